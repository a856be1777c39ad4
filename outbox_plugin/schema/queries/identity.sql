-- name: identity
-- The outbox's incarnation; its table, database and cluster; whether the table is the one that was migrated, or NULL if there
-- is no such table; and whether TRUNCATE makes it another incarnation. The table's schema is looked up by the table's object
-- id, as the same name may mean another table on another `search_path`.
SELECT known.incarnation::text,
       (SELECT format('%%s in database %%s of cluster %%s',
                      CASE WHEN nspname = 'public' THEN relname ELSE nspname || '.' || relname END,
                      current_database(), (SELECT system_identifier FROM pg_control_system()))
        FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
        WHERE pg_class.oid = to_regclass({quoted_outbox})),
       known.table_oid = to_regclass({quoted_outbox})::oid AS is_same_table,
       EXISTS (SELECT FROM pg_trigger WHERE tgrelid = {stored_in} AND tgname = 'outbox_truncated'
                                        AND tgfoid = to_regproc({quoted_outbox_truncated})
                                        AND (tgenabled = 'A' OR tgenabled = 'O'))
FROM {outbox_identity} AS known
WHERE known.table_name = %(table)s

-- name: known_as
-- The name under which the table was migrated: `orders` and `public.orders` may be the same table. If it was migrated under
-- several names, the one under which it is harvested.
SELECT table_name FROM {outbox_identity} WHERE table_oid = to_regclass({quoted_outbox})::oid
ORDER BY harvest_group IS NULL, since, table_name LIMIT 1

-- name: register_group
-- Register the group that harvests this outbox, unless another one is registered. Returns the registered group. If the group
-- changes, the layout's number changes too, so that leaders of the former group which still run read no further row.
UPDATE {outbox_identity}
SET harvest_group = CASE WHEN harvest_group IS NULL OR %(adopt)s THEN %(group)s ELSE harvest_group END,
    layout = CASE WHEN harvest_group <> %(group)s AND %(adopt)s
                  THEN greatest(layout + 1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint) ELSE layout END,
    recorded = CASE WHEN harvest_group <> %(group)s AND %(adopt)s THEN '{{}}' ELSE recorded END
WHERE table_name = %(table)s
RETURNING harvest_group

-- name: register_delivery
-- Register the delivery in which this outbox is harvested, unless the other one is registered. Returns the registered one. If
-- it changes, the layout's number changes too, so that leaders of the former delivery which still run read no further row.
UPDATE {outbox_identity}
SET delivery = CASE WHEN delivery IS NULL OR %(adopt)s THEN %(delivery)s ELSE delivery END,
    layout = CASE WHEN delivery <> %(delivery)s AND %(adopt)s
                  THEN greatest(layout + 1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint) ELSE layout END
WHERE table_name = %(table)s
RETURNING delivery

-- name: register_retention
-- Record how long the outbox keeps published rows; NULL if it keeps none.
UPDATE {outbox_identity} SET history_kept = %(keep)s::interval
WHERE table_name = %(table)s

-- name: secret
-- The key with which the harvesters of this outbox sign heartbeats and progress records.
SELECT secret FROM {outbox_secret} WHERE table_name = %(table)s

-- name: terms
-- The number of the last term of any shard, or 0; by slice, the term of its last progress record; and the slices whose record
-- may be unsigned.
SELECT term, recorded, unsigned FROM {outbox_identity} WHERE table_name = %(table)s

-- name: unsupported_kind
-- What is there by the outbox's name, if it is neither a table nor a view.
SELECT CASE WHEN relkind = 'm' THEN 'a materialized view' WHEN relkind = 'f' THEN 'a foreign table'
            WHEN relkind = 'S' THEN 'a sequence' WHEN relkind = 'c' THEN 'a type' ELSE 'an index' END
FROM pg_class
WHERE oid = to_regclass({quoted_outbox}) AND relkind <> 'r' AND relkind <> 'p' AND relkind <> 'v'

-- name: columns
-- The columns that a harvester needs and the table lacks. Every table has `xmin`; a view has it only if its query selects it.
SELECT needed FROM unnest(ARRAY['id', 'create_time', 'kafka_topic', 'kafka_key', 'kafka_value', 'kafka_header_keys',
                                'kafka_header_values', 'leader_id', 'xmin']) AS needed
WHERE NOT EXISTS (
    SELECT FROM pg_attribute
    WHERE attrelid = to_regclass({quoted_outbox}) AND attname = needed AND NOT attisdropped
)

-- name: columns_of_another_type
-- Columns whose rows no harvester could read, or that it would refuse row by row: their types, and what is expected. A domain
-- counts as the type that it is made from.
WITH RECURSIVE typed AS (
    SELECT attnum, attname, format_type(atttypid, NULL) AS declared, atttypid AS kind_id
    FROM pg_attribute WHERE attrelid = to_regclass({quoted_outbox}) AND NOT attisdropped
    UNION ALL
    SELECT attnum, attname, declared, typbasetype
    FROM typed JOIN pg_type ON pg_type.oid = kind_id WHERE typbasetype <> 0
)
SELECT attname, declared, expected
FROM typed JOIN pg_type AS kind ON kind.oid = kind_id
JOIN (VALUES ('id', 'a BIGINT'), ('kafka_topic', 'a TEXT'), ('kafka_key', 'a TEXT'), ('kafka_value', 'a TEXT or a BYTEA'),
             ('kafka_header_keys', 'a TEXT[]'), ('kafka_header_values', 'a TEXT[]')) AS needed (name, expected)
    ON attname = name
WHERE typbasetype = 0 AND NOT CASE
    WHEN name = 'id' THEN kind.oid = ANY (ARRAY['pg_catalog.int2'::regtype, 'pg_catalog.int4'::regtype, 'pg_catalog.int8'::regtype])
    WHEN name = 'kafka_topic' OR name = 'kafka_key' THEN typcategory = 'S'
    WHEN name = 'kafka_value' THEN typcategory = 'S' OR kind.oid = 'pg_catalog.bytea'::regtype
    ELSE kind.oid = ANY (ARRAY['pg_catalog._text'::regtype, 'pg_catalog._varchar'::regtype, 'pg_catalog._bpchar'::regtype])
END
ORDER BY attnum

-- name: unlogged
-- The tables of the outbox's rows, its partitions among them, that a crash of Postgres empties.
SELECT oid FROM pg_class
WHERE relpersistence = 'u'
  AND (oid = {stored_in} OR EXISTS (SELECT FROM pg_partition_tree({stored_in}) AS part WHERE part.relid = pg_class.oid))

-- name: space_taken
-- The dead rows of the outbox's table and its partitions, as Postgres's statistics have them, and the bytes that they take, with
-- indexes.
SELECT sum(pg_stat_get_dead_tuples(kept.relid)), sum(pg_total_relation_size(kept.relid))
FROM (SELECT {stored_in}::oid AS relid UNION SELECT part.relid FROM pg_partition_tree({stored_in}) AS part) AS kept

-- name: time_of_another_type
-- The type of the time of creation where it is none that a row can be told by, in exactly-once delivery.
SELECT format_type(col.atttypid, NULL) FROM pg_attribute AS col JOIN pg_type AS kind ON kind.oid = col.atttypid
WHERE col.attrelid = to_regclass({quoted_outbox}) AND col.attname = 'create_time' AND NOT col.attisdropped
  AND kind.oid <> 'pg_catalog.timestamptz'::regtype AND kind.typbasetype <> 'pg_catalog.timestamptz'::regtype

-- name: first_creation
-- When the first row of a view was created. A view may show something that differs from read to read.
SELECT waiting.id, waiting.create_time::text FROM {outbox} AS waiting
WHERE (SELECT relkind = 'v' FROM pg_class WHERE oid = to_regclass({quoted_outbox}))
ORDER BY waiting.id LIMIT 1

-- name: takes_whole_records
-- Whether the table has all columns that a whole record needs.
SELECT count(*) = 5
FROM pg_attribute
JOIN unnest(ARRAY['kafka_key_bytes', 'kafka_value_bytes', 'kafka_header_bytes', 'kafka_partition', 'kafka_timestamp'],
            ARRAY['pg_catalog.bytea'::regtype, 'pg_catalog.bytea'::regtype, 'pg_catalog._bytea'::regtype,
                  'pg_catalog.int4'::regtype, 'pg_catalog.timestamptz'::regtype]) AS needed (name, type_id)
    ON attname = needed.name AND atttypid = needed.type_id
WHERE attrelid = to_regclass({quoted_outbox}) AND NOT attisdropped

-- name: values_are_bytes
-- Whether the table's values are bytes.
SELECT 'pg_catalog.bytea'::regtype = ANY (ARRAY[atttypid, typbasetype])
FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid
WHERE attrelid = to_regclass({quoted_outbox}) AND attname = 'kafka_value' AND NOT attisdropped

-- name: unique_ids
-- One row if a unique index keeps two rows from having the same id. Of a partitioned table, an index that begins with the id
-- is enough, because its unique indexes must contain the partition key.
SELECT FROM pg_index JOIN pg_class ON pg_class.oid = indrelid
WHERE indrelid = {stored_in} AND indkey[0] = {id_column}
  AND indisunique AND indisvalid AND (indnkeyatts = 1 OR relkind = 'p') AND indpred IS NULL
LIMIT 1

-- name: stored_in
-- An expression: the table that the rows are stored in. It is the outbox itself, or the one table that the outbox is a view
-- of. NULL for any other view.
(SELECT CASE WHEN found.relkind <> 'v' THEN found.oid ELSE (
            SELECT CASE WHEN count(DISTINCT used.oid) = 1 THEN max(used.oid)::oid END
            FROM pg_rewrite AS rule
            JOIN pg_depend AS uses ON uses.classid = 'pg_rewrite'::regclass AND uses.objid = rule.oid
            JOIN pg_class AS used ON uses.refclassid = 'pg_class'::regclass AND used.oid = uses.refobjid
            WHERE rule.ev_class = found.oid AND used.oid <> found.oid
            HAVING bool_and(used.relkind = 'r' OR used.relkind = 'p')
        ) END
 FROM pg_class AS found WHERE found.oid = to_regclass({quoted_outbox}))

-- name: id_column
-- An expression: the number of the column that the ids are stored in. Postgres does not record which column a view's `id`
-- shows; it is the column that owns the sequence of the ids.
(SELECT CASE WHEN found.relkind <> 'v'
             THEN (SELECT attnum::int FROM pg_attribute WHERE attrelid = found.oid AND attname = 'id')
             ELSE (SELECT owner.refobjsubid FROM pg_depend AS owner
                   WHERE owner.classid = 'pg_class'::regclass AND owner.objid = {id_sequence}
                     AND owner.refclassid = 'pg_class'::regclass AND owner.refobjid = {stored_in}
                     AND owner.refobjsubid > 0 AND (owner.deptype = 'a' OR owner.deptype = 'i'))
        END
 FROM pg_class AS found WHERE found.oid = to_regclass({quoted_outbox}))

-- name: stored
-- The schema and the name of the table that the rows are stored in, and whether the outbox is a view. The names are NULL for a
-- view of anything but one table.
SELECT nspname, stored.relname, found.relkind = 'v'
FROM pg_class AS found
LEFT JOIN pg_class AS stored ON stored.oid = {stored_in}
LEFT JOIN pg_namespace ON pg_namespace.oid = stored.relnamespace
WHERE found.oid = to_regclass({quoted_outbox})

-- name: kept_rows
-- What could silently keep rows from being deleted, or hide them from us: a view from which Postgres cannot delete, or an
-- INSTEAD OF trigger on it; a rule; or row level security without policies for our role: to find a row that it deletes, it must
-- see it.
SELECT 'what it is made of, as a view,' FROM pg_class
WHERE oid = to_regclass({quoted_outbox}) AND relkind = 'v' AND (pg_relation_is_updatable(oid::regclass, false) & 16) = 0
UNION ALL
SELECT format('the trigger %%s', tgname) FROM pg_trigger
WHERE tgrelid = to_regclass({quoted_outbox}) AND (tgtype & 64) <> 0 AND (tgtype & 8) <> 0 AND tgenabled <> 'D'
UNION ALL
SELECT format('the rule %%s', rulename) FROM pg_rewrite
WHERE ev_class = to_regclass({quoted_outbox}) AND ev_type = '4' AND is_instead AND ev_enabled <> 'D'
UNION ALL
SELECT 'row level security, without a policy that lets this role read and delete rows,'
FROM (SELECT {stored_in} AS table_id, {reader} AS role_id) AS access
WHERE {is_row_secured} AND {lacks_policies}

-- name: is_this_outbox
-- An expression: whether the table and its layout are still those that the term began with.
EXISTS (
    SELECT FROM {outbox_identity}
    WHERE table_name = %(table)s AND incarnation = %(incarnation)s AND layout = %(layout)s
      AND table_oid = to_regclass({quoted_outbox})::oid
)

-- name: reader
-- An expression: the role whose rights apply when rows are read. For a view without `security_invoker`, that is its owner.
(SELECT CASE WHEN found.relkind = 'v' AND NOT EXISTS (
                 SELECT FROM pg_options_to_table(found.reloptions)
                 WHERE option_name = 'security_invoker' AND option_value::boolean)
             THEN found.relowner ELSE (SELECT oid FROM pg_roles WHERE rolname = current_user) END
 FROM pg_class AS found WHERE found.oid = to_regclass({quoted_outbox}))

-- name: has_row_security
-- Whether row level security is on for the table that the rows are stored in, or for one of the tables beside the outbox.
SELECT EXISTS (
    SELECT FROM pg_class
    WHERE relrowsecurity AND (oid = {stored_in} OR left(relname::text, 7) = 'outbox_' AND relnamespace = (
        SELECT outbox.relnamespace FROM pg_class AS outbox WHERE outbox.oid = to_regclass({quoted_outbox})
    ))
)

-- name: is_row_secured
-- An expression: whether row level security can hide rows from the reader.
EXISTS (
    SELECT FROM pg_class AS base JOIN pg_roles AS reader ON reader.oid = {reader}
    WHERE base.oid = {stored_in} AND base.relrowsecurity AND NOT reader.rolsuper AND NOT reader.rolbypassrls
      AND (base.relforcerowsecurity OR NOT pg_has_role(reader.oid, base.relowner, 'USAGE'))
)

-- name: lacks_policies
-- An expression: whether the table `access.table_id` has no policies that let the role `access.role_id` read and delete rows.
EXISTS (SELECT FROM unnest(ARRAY['r', 'd']) AS command WHERE NOT EXISTS (
    SELECT FROM pg_policy
    WHERE polrelid = access.table_id AND polpermissive AND polcmd::text = ANY (ARRAY['*', command])
      AND EXISTS (SELECT FROM unnest(polroles) AS role
                  WHERE CASE WHEN role = 0 THEN true ELSE pg_has_role(access.role_id, role, 'USAGE') END)
))

-- name: isolation
-- The default isolation of our transactions.
SELECT current_setting('default_transaction_isolation')

-- name: sequence_form
-- How many ids a session draws ahead, the step from id to id, and whether ids begin again at the end. Ids ascend in the order of
-- transactions only with 1, a positive step and no new beginning.
SELECT seqcache, seqincrement, seqcycle FROM pg_sequence WHERE seqrelid = {id_sequence}

-- name: id_sequence
-- An expression: the sequence that ids are drawn from. It is that of GENERATED AS IDENTITY, or else that of a default which is
-- a plain call of nextval. A sequence that the column merely owns, such as that of an earlier default, does not count.
-- pg_get_expr locks the table of the default: without the CASE, some plans call it for every default of the database first,
-- and wait for whoever has locked another table. It quotes names where the database's settings say so.
coalesce(
    (SELECT drawn.objid
     FROM pg_attribute AS col
     JOIN pg_depend AS drawn ON drawn.refobjid = col.attrelid AND drawn.refobjsubid = col.attnum
     WHERE col.attrelid = to_regclass({quoted_outbox}) AND col.attname = 'id' AND col.attidentity <> ''
       AND drawn.refclassid = 'pg_class'::regclass AND drawn.classid = 'pg_class'::regclass AND drawn.deptype = 'i'),
    (SELECT drawn.refobjid
     FROM pg_attribute AS col
     JOIN pg_attrdef AS preset ON preset.adrelid = col.attrelid AND preset.adnum = col.attnum
     JOIN pg_depend AS drawn ON drawn.classid = 'pg_attrdef'::regclass AND drawn.objid = preset.oid
     JOIN pg_class AS found ON found.oid = drawn.refobjid AND found.relkind = 'S'
     WHERE col.attrelid = to_regclass({quoted_outbox}) AND col.attname = 'id'
       AND drawn.refclassid = 'pg_class'::regclass
       AND CASE WHEN preset.adrelid = col.attrelid THEN pg_get_expr(preset.adbin, preset.adrelid) END
           ~ '^"?nextval"?[(]''([^'']|'''')*''::"?regclass"?[)]$')
)

-- name: identity_tables
-- The tables that register outboxes, in all schemas that we may read. Tables of other owners are left out: their columns may
-- differ, and reading them could run their owner's code in a policy.
SELECT schema.nspname, found.relname
FROM pg_catalog.pg_class AS found
JOIN pg_catalog.pg_namespace AS schema ON schema.oid = found.relnamespace
WHERE found.relname = 'outbox_identity' AND found.relkind = 'r'
  AND pg_catalog.has_schema_privilege(schema.oid, 'USAGE') AND pg_catalog.has_table_privilege(found.oid, 'SELECT')
  AND NOT found.relrowsecurity
  AND found.relowner = (SELECT ours.relowner FROM pg_catalog.pg_class AS ours
                        WHERE ours.oid = (SELECT known.tableoid FROM {outbox_identity} AS known LIMIT 1))
