"""The state of an outbox, read from Postgres and Kafka: the health rules on it, and the command `outbox status`."""
