-- Makes an outbox that is truncated another incarnation: its ids may be given again, to rows that were never published.
-- Whoever truncates needs no right to our tables. `outbox migrate` puts the trigger on the table, as an outbox that was
-- made anew has none.
DO $do$
DECLARE
    home TEXT := (SELECT relnamespace::regnamespace::text FROM pg_class
                  WHERE oid = to_regclass({quoted_outbox_identity}));
BEGIN
    EXECUTE format($create$
        CREATE OR REPLACE FUNCTION %1$s.outbox_truncated() RETURNS trigger LANGUAGE plpgsql
        SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            UPDATE %1$s.outbox_identity SET incarnation = gen_random_uuid() WHERE table_oid = TG_RELID;
            RETURN NULL;
        END $body$
    $create$, home);
END $do$;
