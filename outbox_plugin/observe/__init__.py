"""What an operator's tools ask a running process: metrics, whether it is ready, whether it is alive.

`server` speaks HTTP, `port` shares one server between all that run in a process, `metrics` counts what happens,
`watch` collects the facts that `core.readiness` judges, `table` asks Postgres, and `harvester` joins them for one
harvester.
"""
