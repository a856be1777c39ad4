"""The poller of lags, where no partition is held: it only shows whether Kafka answers."""

from __future__ import annotations

import subprocess
import sys

from tests.kafka_without_brokers import KafkaWithoutBrokers
from tests.support import eventually

POLL = """
import sys
from functools import partial
from outbox_plugin import Settings
from outbox_plugin.observe import lag_poller

lag_poller.POLL_SECONDS = 0.05
settings = Settings(dsn="postgresql://nowhere/db", bootstrap_servers=f"127.0.0.1:{sys.argv[1]}")
poller = lag_poller.LagPoller(settings, dict, partial(print, flush=True), partial(print, flush=True))
sys.stdin.read()
poller.close()
"""


def test_a_broker_that_lists_no_broker_does_not_end_the_process() -> None:
    """Not even itself: so it is until a broker that was away for long has registered again."""
    with (
        KafkaWithoutBrokers().running() as kafka,
        subprocess.Popen(
            [sys.executable, "-c", POLL, str(kafka.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as polling,
    ):
        assert polling.stdin is not None
        assert polling.stdout is not None
        try:
            assert polling.stdout.readline() == "{}\n"
            kafka.is_registered = False
            eventually(lambda: kafka.lists_without_brokers > 0 or polling.poll() is not None, 30)
            kafka.is_registered = True
            lines = iter(polling.stdout.readline, "")
            assert "{}\n" in lines
            polling.stdin.close()
            assert polling.wait(30) == 0
        finally:
            polling.kill()
