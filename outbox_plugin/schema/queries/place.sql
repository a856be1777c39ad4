-- name: schema
-- The outbox's schema; if the outbox does not exist, the schema in which it would be created: the first of the search_path
-- that exists.
SELECT coalesce(
    (SELECT nspname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
     WHERE pg_class.oid = to_regclass({quoted_outbox})),
    current_schema()
)

-- name: schemas
-- The schemas whose names match a pattern, and which have a migrated outbox of that name.
SELECT nspname FROM pg_namespace
WHERE nspname ~~ %(pattern)s
  AND EXISTS (SELECT FROM pg_class WHERE relnamespace = pg_namespace.oid AND relname = %(name)s
                                     AND relkind = ANY ('{{r,p,v}}'))
  AND EXISTS (SELECT FROM pg_class WHERE relnamespace = pg_namespace.oid AND relname = 'outbox_identity')
ORDER BY nspname
