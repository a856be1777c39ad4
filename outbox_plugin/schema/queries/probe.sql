-- name: state_of_session
-- The process id of this session; the state of the session with the given process id: NULL if there is none, 'hidden' if we
-- may not see it; this session's application_name; and whether the server is working for the session with the given
-- application_name: NULL if there is none. A session that waits for its client to receive data is not working.
SELECT pg_catalog.pg_backend_pid(),
       (SELECT coalesce(state, 'hidden') FROM pg_catalog.pg_stat_activity WHERE pid = %(pid)s),
       current_setting('application_name'),
       (SELECT bool_or(NOT starts_with(coalesce(state, 'hidden'), 'idle') AND coalesce(wait_event, '') <> 'ClientWrite')
        FROM pg_catalog.pg_stat_activity WHERE starts_with(application_name, %(name)s))

-- name: watch_client
-- For the transaction: the server probes the client's machine. Otherwise a machine that lost power would keep the
-- transaction's locks for hours.
SELECT set_config('tcp_keepalives_idle', '5', true), set_config('tcp_keepalives_interval', '2', true),
       set_config('tcp_keepalives_count', '3', true), set_config('tcp_user_timeout', '10000', true)

-- name: disable_time_outs
-- Keep time-outs that a role sets, of idle sessions and of transactions, from ending this session. Does nothing behind a
-- pooler, which shares its sessions with other clients: there, the process ids differ.
SELECT set_config(time_out, '0', false) FROM unnest(%(time_outs)s::text[]) AS time_out WHERE pg_backend_pid() = %(pid)s
