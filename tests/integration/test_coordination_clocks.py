"""Consumers and an operator whose clocks are wrong, as processes of their own: no clock but the brokers' counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outbox_plugin.coordination import Admin, Consumer
from tests.chaos.coordination_worker import RECORD
from tests.documents import CHECKOUT
from tests.integration.test_coordination import INTERVAL, PARTITIONS, Running, orders, write
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration
__all__ = ["orders", "write"]  # Fixtures.

SOON = 60.0
# Runs the command line with clocks that are wrong by the first argument.
OPERATOR = """
import sys
from tests.chaos.coordination_worker import set_clocks
set_clocks(float(sys.argv.pop(1)))
from outbox_plugin.cli import main
main()
"""


class WrongClock:
    """A consumer in a process whose clocks are ahead by so many seconds. Its group has the topic's name."""

    def __init__(self, bootstrap_servers: str, topic: str, ahead: float, out: Path) -> None:
        self._out = out
        command = [sys.executable, "-m", "tests.chaos.coordination_worker", bootstrap_servers, topic]
        command += ["at-least-once", "wrong", str(INTERVAL), "--", str(ahead)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=CHECKOUT)
        assert self._process.stdin is not None
        self._process.stdin.write(str(out).encode())
        self._process.stdin.close()

    def records(self) -> list[tuple[int, int]]:
        """The partition and the offset of each record that it has handled."""
        content = _content(self._out.with_suffix(".records"))
        whole = len(content) // RECORD.size * RECORD.size
        return [(partition, offset) for partition, offset, _ in RECORD.iter_unpack(content[:whole])]

    def held(self) -> int:
        """How many partitions it holds."""
        lines = _content(self._out.with_suffix(".events")).split(b"\n")[:-1]
        kinds = [json.loads(line)["kind"] for line in lines]
        return kinds.count("gained") - kinds.count("lost")

    def end(self) -> None:
        self._process.terminate()
        assert self._process.wait(90 * PATIENCE) == 0


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


@pytest.fixture
def right(bootstrap_servers: str, orders: str) -> Iterator[Running]:
    """A consumer whose clock is right."""
    running = Running(
        Consumer(
            [orders],
            orders,
            "right",
            heartbeat_interval_seconds=INTERVAL,
            coordination_topic=f"{orders}-claims",
            bootstrap_servers=bootstrap_servers,
        )
    )
    yield running
    running.end()


def operate(bootstrap_servers: str, topic: str, ahead: float, *command: str) -> None:
    """Run `outbox consumers` with clocks that are ahead by so many seconds."""
    arguments = ["consumers", "--coordination-topic", f"{topic}-claims", "--heartbeat-interval", str(INTERVAL)]
    subprocess.run(
        [sys.executable, "-c", OPERATOR, str(ahead), *arguments, *command],
        env={**os.environ, "OUTBOX_BOOTSTRAP_SERVERS": bootstrap_servers},
        cwd=CHECKOUT,
        timeout=120 * PATIENCE,
        check=True,
    )


@pytest.mark.parametrize("ahead", [12.0, -12.0])
def test_an_instance_whose_clock_is_wrong_has_its_share(
    bootstrap_servers: str,
    orders: str,
    write: Callable[[range], None],
    right: Running,
    tmp_path: Path,
    ahead: float,
) -> None:
    wrong = WrongClock(bootstrap_servers, orders, ahead, tmp_path / "wrong")
    try:
        eventually(lambda: (wrong.held(), len(right.consumer.claims)) == (3, 3), SOON)
        write(range(600))
        eventually(lambda: len(wrong.records()) + len(right.seen) >= 600, SOON)
        handled = wrong.records() + [(partition, offset) for partition, offset, _ in right.seen]
        assert sorted(handled) == [(partition, offset) for partition in range(PARTITIONS) for offset in range(100)]
        assert wrong.records()
    finally:
        wrong.end()


@pytest.mark.parametrize("ahead", [2.6, -2.6, 3_600.0])
def test_a_group_obeys_an_operator_whose_clock_is_wrong(
    bootstrap_servers: str, orders: str, write: Callable[[range], None], right: Running, ahead: float
) -> None:
    admin = Admin(
        bootstrap_servers=bootstrap_servers, coordination_topic=f"{orders}-claims", heartbeat_interval_seconds=INTERVAL
    )
    eventually(lambda: len(right.consumer.claims) == PARTITIONS, SOON)
    operate(bootstrap_servers, orders, ahead, "pause", orders)
    assert right.consumer.claims == {}
    assert {row.state for row in admin.world(orders).rows} == {"paused"}
    write(range(60))
    operate(bootstrap_servers, orders, ahead, "resume", orders)
    eventually(lambda: len(right.numbers) == 60, SOON)
