"""Pytest fixtures: a real Postgres and Kafka for the whole run, and an empty outbox for each test.

In `conftest.py`: `pytest_plugins = ["outbox_plugin.testing.fixtures"]`. They need `outbox-plugin[embedded]` and pytest.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from outbox_plugin.embedded.stack import EmbeddedStack, Endpoints
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings


@pytest.fixture(scope="session")
def outbox_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    """A Postgres and a Kafka, in a temporary folder. They start with the first test that uses them."""
    with EmbeddedStack(tmp_path_factory.mktemp("outbox-servers")) as endpoints:
        yield endpoints


@pytest.fixture
def outbox_settings(outbox_servers: Endpoints) -> Iterator[Settings]:
    """Settings of an outbox for one test: an empty, migrated database, and a group that no other test has.

    All tests share Kafka, which creates topics on first use. So a test that reads a topic needs a unique name for it.
    """
    name = f"outbox_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(outbox_servers.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        settings = Settings(
            dsn=outbox_servers.dsn.rsplit("/", 1)[0] + f"/{name}",
            bootstrap_servers=outbox_servers.bootstrap_servers,
            group=name,
        )
        migrate(settings)
        yield settings
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
