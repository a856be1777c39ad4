"""The harvester's edges: real Postgres and real Kafka behind the ports of `core`."""
