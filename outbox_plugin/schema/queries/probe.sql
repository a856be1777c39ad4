-- name: state_of_session
-- The process id of this session, and what the server does for another one: NULL where there is no such session,
-- 'hidden' where we may not know. Then this session's name, and whether the server works for one that has a name of its
-- own: NULL where there is none. One that waits for its client to receive what it sends does not.
SELECT pg_catalog.pg_backend_pid(),
       (SELECT coalesce(state, 'hidden') FROM pg_catalog.pg_stat_activity WHERE pid = %(pid)s),
       current_setting('application_name'),
       (SELECT bool_or(NOT starts_with(coalesce(state, 'hidden'), 'idle') AND coalesce(wait_event, '') <> 'ClientWrite')
        FROM pg_catalog.pg_stat_activity WHERE starts_with(application_name, %(name)s))

-- name: watch_client
-- Until the transaction ends, the server looks whether the client's machine is still there: one that has lost its power
-- would keep what the transaction has locked for hours.
SELECT set_config('tcp_keepalives_idle', '5', true), set_config('tcp_keepalives_interval', '2', true),
       set_config('tcp_keepalives_count', '3', true), set_config('tcp_user_timeout', '10000', true)

-- name: stay_idle
-- A role's time-out would end a session of ours that has nothing to do. Not behind a pooler, which shares its sessions with
-- others, and makes up process ids.
SELECT set_config('idle_session_timeout', '0', false) WHERE pg_backend_pid() = %(pid)s

-- name: take_long
-- The same for a transaction that takes long; for Postgres 17 and later ones.
SELECT set_config('transaction_timeout', '0', false) WHERE pg_backend_pid() = %(pid)s
