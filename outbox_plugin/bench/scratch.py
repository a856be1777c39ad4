"""An outbox of a benchmark's own, on servers that are a user's."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from confluent_kafka.admin import AdminClient
from psycopg import sql

from outbox_plugin.adapters.kafka import client_config
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings


@contextmanager
def scratch_outbox(settings: Settings) -> Iterator[Settings]:
    """Settings for a schema and a group of the benchmark's own, both gone afterwards."""
    name = f"outbox_bench_{uuid.uuid4().hex[:8]}"
    scratch = settings.model_copy(update={"table": f"{name}.outbox", "group": name})
    with psycopg.connect(scratch.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        try:
            migrate(scratch)
            yield scratch
        finally:
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))
            admin = AdminClient(client_config(scratch))
            topics = [topic for topic in admin.list_topics(timeout=10).topics if topic.startswith(name)]
            for future in admin.delete_topics(topics).values() if topics else ():
                future.result(10)
