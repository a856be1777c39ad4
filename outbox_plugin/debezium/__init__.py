"""Moves here from Debezium's outbox event router: its table is relayed as it is, and its records stay as they are."""
