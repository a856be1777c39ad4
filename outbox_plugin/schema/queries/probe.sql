-- name: state_of_session
-- The process id of this session, and what the server does for another one: NULL where there is no such session,
-- 'hidden' where we may not know.
SELECT pg_catalog.pg_backend_pid(),
       (SELECT coalesce(state, 'hidden') FROM pg_catalog.pg_stat_activity WHERE pid = %(pid)s)
