-- As before; and where the outbox is a view of the table that is truncated, it becomes another incarnation, too.
DO $do$
DECLARE
    home TEXT := (SELECT relnamespace::regnamespace::text FROM pg_class
                  WHERE oid = to_regclass({quoted_outbox_identity}));
BEGIN
    EXECUTE format($create$
        CREATE OR REPLACE FUNCTION %1$s.outbox_truncated() RETURNS trigger LANGUAGE plpgsql
        SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            UPDATE %1$s.outbox_identity SET incarnation = gen_random_uuid()
            WHERE table_oid = TG_RELID OR table_oid IN (
                SELECT rule.ev_class FROM pg_depend AS uses JOIN pg_rewrite AS rule ON rule.oid = uses.objid
                WHERE uses.classid = 'pg_rewrite'::regclass
                  AND uses.refclassid = 'pg_class'::regclass AND uses.refobjid = TG_RELID
            );
            RETURN NULL;
        END $body$
    $create$, home);
END $do$;
