"""Reads the state of an outbox from Postgres and Kafka, and judges its health. Also the command `outbox status`."""
