-- A value that came as text, as an outbox of `like_this` type holds it.
CREATE OR REPLACE FUNCTION {outbox_value}(value TEXT, like_this TEXT) RETURNS TEXT LANGUAGE sql STABLE
AS $$ SELECT value $$;
CREATE OR REPLACE FUNCTION {outbox_value}(value TEXT, like_this BYTEA) RETURNS BYTEA LANGUAGE sql STABLE
AS $$ SELECT convert_to(value, 'UTF8') $$;
