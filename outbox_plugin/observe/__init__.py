"""What an operator sees of a running process: its log, its metrics, whether it is ready, whether it is alive.

`server` speaks HTTP, `port` shares one server between all that run in a process, `metrics` counts what happens,
`readiness_facts` collects the facts that `core.readiness` judges, `table_poller` asks Postgres, and `harvester` joins
them for one harvester. `event_log` writes a harvester's log, and needs none of these. `lag_poller` asks
Kafka how far a group is behind. `inbox.observed` joins it with `inbox_metrics` for one inbox, and
`coordination.observed` with `coordination_metrics` for one consumer.

`tracing` finds OpenTelemetry's tracer, and `relay_spans` makes the spans of a harvester. Those of an inbox are made by
`inbox.traced_session`.
"""
