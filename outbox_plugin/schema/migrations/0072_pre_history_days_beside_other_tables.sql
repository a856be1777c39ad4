-- As before, but no plan reads the bounds of other tables' partitions: pg_get_expr waits for whoever has locked such a
-- table, and a bound that is no time is an error. Only a CASE keeps to its order.
CREATE OR REPLACE FUNCTION {outbox_history_days}(keep INTERVAL) RETURNS BOOLEAN LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET lock_timeout = '100ms'
AS $days$
DECLARE
    parent CONSTANT regclass := {quoted_outbox_history}::regclass;
    home   CONSTANT name := (SELECT nspname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
                             WHERE pg_class.oid = parent);
    day    date;
    named  text;
    old    regclass;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('outbox_history', 0));
    FOR day IN
        SELECT current_date + number FROM generate_series(0, 1) AS number
        EXCEPT
        SELECT substring(pg_get_expr(relpartbound, pg_class.oid) FROM 'FROM [(]''([^'']+)''[)]')::timestamptz::date
        FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid WHERE inhparent = parent
        ORDER BY 1
    LOOP
        named := 'outbox_history_' || to_char(day, 'YYYYMMDD');
        IF to_regclass(format('%I.%I', home, named)) IS NOT NULL THEN
            named := named || '_' || substr(gen_random_uuid()::text, 1, 8);
        END IF;
        EXECUTE format('CREATE TABLE %I.%I (LIKE %s INCLUDING ALL)', home, named, parent);
        EXECUTE format('ALTER TABLE %s ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)',
                       parent, home, named, day::timestamptz, (day + 1)::timestamptz);
    END LOOP;
    FOR old IN
        SELECT inhrelid::regclass FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
        WHERE inhparent = parent
          AND CASE WHEN inhparent = parent THEN
              substring(pg_get_expr(relpartbound, pg_class.oid) FROM 'TO [(]''([^'']+)''[)]')::timestamptz
              <= current_date - greatest(keep, interval '0')
          END
    LOOP
        BEGIN
            EXECUTE format('DROP TABLE %s', old);
        EXCEPTION WHEN lock_not_available THEN
            RETURN false;
        END;
    END LOOP;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$days$;
