-- name: schema
-- The outbox's schema; if the outbox does not exist, the schema in which it would be created: the first of the search_path
-- that exists.
SELECT coalesce(
    (SELECT nspname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
     WHERE pg_class.oid = to_regclass({quoted_outbox})),
    current_schema()
)
