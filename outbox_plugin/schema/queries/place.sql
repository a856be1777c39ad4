-- name: schema
-- The outbox's schema; if the outbox does not exist, the schema in which it would be created: the first of the search_path
-- that exists.
SELECT coalesce(
    (SELECT nspname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
     WHERE pg_class.oid = to_regclass({quoted_outbox})),
    current_schema()
)

-- name: schemas
-- The schemas whose names match a pattern, and which have a migrated outbox of that name; with the name of an owner that is
-- not trusted, or NULL. A table's owner can make whoever uses it run any code. Trusted are our role, and roles that may create
-- schemas in the database, because they could create one that matches. The schema that was created first comes first.
SELECT nspname,
       (SELECT rolname FROM pg_roles
        WHERE oid = ANY (ARRAY[nspowner, outbox.relowner, known.relowner]) AND rolname <> current_user
          AND NOT has_database_privilege(oid, current_database(), 'CREATE')
        ORDER BY rolname LIMIT 1)
FROM pg_namespace
JOIN pg_class AS outbox ON outbox.relnamespace = pg_namespace.oid AND outbox.relname = %(name)s
                       AND outbox.relkind = ANY ('{{r,p,v}}')
JOIN pg_class AS known ON known.relnamespace = pg_namespace.oid AND known.relname = 'outbox_identity'
WHERE nspname ~~ %(pattern)s
ORDER BY pg_namespace.oid
