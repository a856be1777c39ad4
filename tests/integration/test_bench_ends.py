"""`outbox bench` that is ended early: it drops what it has made on the user's servers, and leaves no process."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from outbox_plugin.settings import Settings
from tests.harvesting import environment
from tests.processes import outbox_that_hears
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("benchmark", ["drain", "inbox", "latency"])
def test_a_benchmark_that_is_ended_leaves_nothing_behind(
    settings: Settings, tmp_path: Path, benchmark: str, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            outbox_that_hears(number, "bench", benchmark),
            env=environment(settings),
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as bench,
    ):
        try:
            eventually(lambda: topics(settings, schemas(settings)) or bench.poll() is not None, 60)
            made = schemas(settings)
            started = psutil.Process(bench.pid).children(recursive=True)
            bench.send_signal(number)
            assert bench.wait(60 * PATIENCE) == 128 + number, log.read_text()
        finally:
            bench.kill()
    assert "Traceback" not in (said := log.read_text()), said
    assert made
    assert schemas(settings) == []
    eventually(lambda: topics(settings, made) == [], 30)  # The broker hears of deletions from its controller.
    eventually(lambda: not any(each.is_running() for each in started), 30)


def topics(settings: Settings, schemas: Sequence[str]) -> list[str]:
    """The topics of benchmarks with these schemas. The servers of Kafka are shared with other tests."""
    found = AdminClient({"bootstrap.servers": settings.bootstrap_servers}).list_topics(timeout=30).topics
    return [topic for topic in found if any(topic.startswith(schema) for schema in schemas)]


def schemas(settings: Settings) -> list[str]:
    """The schemas of benchmarks."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        query = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'outbox_bench_%'"
        return [name for (name,) in connection.execute(query)]
