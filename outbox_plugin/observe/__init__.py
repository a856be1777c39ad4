"""What operators see of a running process: its log, its metrics, whether it is ready, whether it is alive.

`http_server` serves HTTP. `telemetry_server` shares one such server between all harvesters, inboxes and consumers of a
process. `harvester_metrics` counts what happens, `harvester_facts` collects the facts by which
`core.harvester_readiness` decides, and `table_poller` queries Postgres; `harvester_telemetry` joins these for one
harvester. `event_log` writes a harvester's log, independently of these.
`lag_poller` asks Kafka how far a group is behind. `inbox.inbox_telemetry` joins it with `inbox_metrics` for one inbox,
and `coordination.consumer_telemetry` with `coordination_metrics` for one consumer.

`tracing` finds OpenTelemetry's tracer. `relay_spans` makes the spans of a harvester, `inbox.traced_session` those of an
inbox.
"""
