"""Replaces Debezium's outbox event router: its table stays as it is, and so does the form of the records."""
