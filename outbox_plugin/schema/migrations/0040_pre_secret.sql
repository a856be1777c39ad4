-- What the harvesters of an outbox sign their heartbeats and progress records with. Whoever can read it can write such
-- records, so nobody may by default privileges. Roles that may harvest, which one can tell by their right to update
-- `outbox_identity`, may read it from the start.
DO $do$
DECLARE
    grantee TEXT;
BEGIN
    IF to_regclass({quoted_outbox_secret}) IS NOT NULL THEN
        RETURN;
    END IF;
    CREATE TABLE {outbox_secret} (
        table_name TEXT  PRIMARY KEY,
        secret     BYTEA NOT NULL CHECK (octet_length(secret) = 32)
    );
    FOR grantee IN
        SELECT DISTINCT CASE acl.grantee WHEN 0 THEN 'PUBLIC' ELSE acl.grantee::regrole::text END
        FROM pg_class, aclexplode(relacl) AS acl
        WHERE pg_class.oid = to_regclass({quoted_outbox_secret}) AND acl.grantee <> relowner
    LOOP
        EXECUTE format('REVOKE ALL ON %s FROM %s', {quoted_outbox_secret}, grantee);
    END LOOP;
    FOR grantee IN
        SELECT DISTINCT acl.grantee::regrole::text
        FROM pg_class, aclexplode(relacl) AS acl
        WHERE pg_class.oid = to_regclass({quoted_outbox_identity})
          AND acl.privilege_type = 'UPDATE' AND acl.grantee <> 0 AND acl.grantee <> relowner
    LOOP
        EXECUTE format('GRANT SELECT ON %s TO %s', {quoted_outbox_secret}, grantee);
    END LOOP;
END $do$;
