-- The outbox itself, in goharvest's form; an existing table of that form is left as it is.
CREATE TABLE IF NOT EXISTS {outbox} (
    id                  BIGSERIAL    PRIMARY KEY,
    create_time         TIMESTAMPTZ  NOT NULL DEFAULT now(),
    kafka_topic         VARCHAR(249) NOT NULL,
    kafka_key           VARCHAR(100) NOT NULL,
    kafka_value         TEXT         NULL,
    kafka_header_keys   TEXT[]       NOT NULL DEFAULT '{{}}',
    kafka_header_values TEXT[]       NOT NULL DEFAULT '{{}}',
    leader_id           UUID         NULL
);

-- Who each outbox is, and which group harvests it. `table_oid` tells a table that was dropped and made anew.
CREATE TABLE IF NOT EXISTS {outbox_identity} (
    table_name    TEXT        PRIMARY KEY,
    table_oid     OID         NOT NULL,
    incarnation   UUID        NOT NULL,
    harvest_group TEXT        NULL,
    since         TIMESTAMPTZ NOT NULL DEFAULT now()
);
