"""Helpers of the long tests on real servers: servers, a load, and the count of every row at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from outbox_plugin import Settings
from outbox_plugin.bench.fleet import Fleet
from outbox_plugin.bench.judge import judge
from outbox_plugin.bench.reader import LiveReader, read_until
from outbox_plugin.bench.temporary_outbox import create_topic
from outbox_plugin.bench.writer import Mix, Writer
from tests.harvesting import drained
from tests.support import eventually

FLOWS_SECONDS = 60.0


class Load:
    """A writer, harvesters, and a reader that sees what they do."""

    def __init__(self, settings: Settings, folder: Path, mix: Mix, slots: Sequence[Settings]) -> None:
        self.topic = f"{settings.group}-events"
        create_topic(settings, self.topic, 6)
        self.fleet = Fleet(settings, len(slots), folder, slots=slots)
        self.writer = Writer(settings, self.topic, mix, seed=1)
        self.reader = LiveReader(settings, self.topic)

    def flows(self, seconds: float = FLOWS_SECONDS) -> None:
        """Wait until what is written from now on arrives."""
        written = self.writer.rows + 100
        assert self.reader.wait_for(lambda arrivals: len(arrivals) > written, seconds), "nothing flows any more"

    def leader(self) -> int:
        """Wait for a leader; the number of its slot."""
        leaders: list[int] = []  # To ask again may give another answer.

        def found() -> bool:
            leaders.extend(slot for slot in [self.fleet.leader()] if slot is not None)
            return bool(leaders)

        eventually(found, FLOWS_SECONDS)
        return leaders[0]


@contextmanager
def load(
    settings: Settings,
    folder: Path,
    mix: Mix | None = None,
    slots: Sequence[Settings] | None = None,
    restore: Callable[[], None] = lambda: None,
) -> Iterator[Load]:
    """Load from two harvesters, or those of `slots`, for as long as the body runs.

    Then every row must have arrived, in order, and once where delivery is exactly once. `restore` makes the servers fit
    for the next test, whatever became of this one.
    """
    running = Load(settings, folder, mix or Mix(), slots or [settings] * 2)
    with running.reader.reading(), running.fleet.running():
        try:
            with running.writer.writing():
                running.flows()
                yield running
            drained(settings)
        finally:
            restore()
    committed = running.writer.committed()
    rows = sum(each.rows for each in committed.values())
    verdict = judge(committed, read_until(settings, running.topic, lambda seen: len(seen) >= rows, 60))
    assert verdict.arrived == rows, verdict
    assert (verdict.lost, verdict.order_violations, verdict.phantoms) == (0, 0, 0), verdict
    assert settings.delivery == "at-least-once" or verdict.duplicates == 0, verdict
    assert running.fleet.failures == []
    assert "Traceback" not in running.fleet.log
