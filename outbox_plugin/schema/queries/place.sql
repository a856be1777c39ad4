-- name: schema
-- The schema that the outbox lies in, or is to be made in: the first of the search_path that it can be.
SELECT coalesce(
    (SELECT nspname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
     WHERE pg_class.oid = to_regclass({quoted_outbox})),
    current_schema()
)
