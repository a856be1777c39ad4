"""What a rebalance costs, in each way to share a topic: the same events happen in each way, one way after another.

`python -m tests.chaos.groups` starts real servers. Three members share 12 partitions that get 20 records a second
each. A fourth joins; it leaves; one is killed and restarted at once; one is killed for good. After each event, it
prints how long records waited: those of partitions that stayed with their member, and those of the others. Last, four
members begin to share 1,000 partitions at the same time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from outbox_plugin.embedded.stack import EmbeddedStack, Endpoints
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings
from tests.chaos.groups_worker import KINDS
from tests.support import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDS = np.dtype([("partition", "<u2"), ("offset", "<u8"), ("at", "<f8"), ("written", "<f8")])
PARTITIONS, MANY = 12, 1_000
MEMBERS = 3
PER_SECOND = 20  # Records, in each partition.
SETTLED_SECONDS = 12.0  # Some heartbeats, in which a member asks for its share, and others give it up.
HOLDING_SECONDS = 2.0
PATIENCE_SECONDS = 180.0

Records = np.ndarray[tuple[int], np.dtype[np.void]]


@dataclass(frozen=True)
class Waited:
    """The cost of an event: the longest wait of a record, in seconds, by partition."""

    event: str
    stayed: list[float]
    moved: list[float]

    def cells(self) -> list[str]:
        """As columns of a table."""
        return [self.event, *(f"{max(each):.2f} ({len(each)})" if each else "-" for each in (self.stayed, self.moved))]


class Member:
    """A member, whose process consumes in one way. The next process waits, with its imports done."""

    def __init__(self, name: str, kind: str, topic: str, folder: Path, endpoints: Endpoints) -> None:
        self.name = name
        self._folder = folder
        self._runs: list[Path] = []
        self._command = [sys.executable, "-m", "tests.chaos.groups_worker", kind]
        self._command += [endpoints.bootstrap_servers, topic, name]
        self._environment = {
            **os.environ,
            "OUTBOX_DSN": endpoints.dsn,
            "OUTBOX_BOOTSTRAP_SERVERS": endpoints.bootstrap_servers,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._spare = self._launch()

    def _launch(self) -> subprocess.Popen[bytes]:
        with (self._folder / f"{self.name}.log").open("ab") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env=self._environment,
            )

    def start(self) -> None:
        """Have it consume."""
        self._runs.append(self._folder / f"{self.name}-{len(self._runs)}")
        self._process, self._spare = self._spare, self._launch()
        assert self._process.stdin is not None
        self._process.stdin.write(str(self._runs[-1]).encode())
        self._process.stdin.close()

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(20)

    def terminate(self) -> None:
        """End it cleanly."""
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(60) == 0

    def close(self) -> None:
        """End all that is left of it."""
        for process in (self._process, self._spare):
            if process is not None:
                process.kill()
                process.wait(20)

    def records(self) -> Records:
        """All that it was handed."""
        found = [np.fromfile(each, RECORDS) for each in self._runs if each.exists()]
        return np.concatenate([np.empty(0, RECORDS), *found])


class Writer:
    """Writes `PER_SECOND` records a second to each partition, until it is stopped."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self._producer = Producer({"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, "log_level": 3})
        self._topic = topic
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox-writer")
        self.written = 0
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(1 / PER_SECOND):
            for partition in range(PARTITIONS):
                self._producer.produce(self._topic, b"x" * 100, b"key-%d" % self.written, partition=partition)
                self.written += 1
            self._producer.poll(0)
        assert self._producer.flush(60) == 0
        self._producer.close()

    def stop(self) -> None:
        """All that was written is in Kafka."""
        self._stop.set()
        self._thread.join()


class Comparison:
    """One way to share a topic."""

    def __init__(self, kind: str, endpoints: Endpoints, folder: Path) -> None:
        self._kind = kind
        self._endpoints = endpoints
        self._folder = folder
        self._topic = f"way-{KINDS.index(kind)}"

    def events(self) -> Iterator[Waited]:
        """What each event cost."""
        create(self._endpoints, self._topic, PARTITIONS)
        with self._members(MEMBERS + 1, self._topic) as members:
            *regular, fourth = members
            writer = Writer(self._endpoints.bootstrap_servers, self._topic)
            try:
                for member in regular:
                    member.start()
                self._caught_up(members, writer)
                yield self._after("a member joins", members, writer, fourth, fourth.start)
                yield self._after("it leaves", members, writer, fourth, fourth.terminate)
                yield self._after("killed, and started again", members, writer, regular[0], lambda: restart(regular[0]))
                yield self._after("killed for good", members, writer, regular[1], regular[1].kill)
            finally:
                writer.stop()

    def many(self) -> float:
        """How many seconds members that begin at once need to read a first record of each of many partitions."""
        topic = f"{self._topic}-many"
        create(self._endpoints, topic, MANY)
        producer = Producer({"bootstrap.servers": self._endpoints.bootstrap_servers, "log_level": 3})
        for partition in range(MANY):
            producer.produce(topic, b"x", b"key", partition=partition)
        assert producer.flush(60) == 0
        producer.close()
        with self._members(MEMBERS + 1, topic) as members:
            began = time.monotonic()
            for member in members:
                member.start()
            eventually(lambda: len(np.unique(together(members)["partition"])) == MANY, PATIENCE_SECONDS)
            return time.monotonic() - began

    @contextmanager
    def _members(self, count: int, topic: str) -> Iterator[list[Member]]:
        folder = self._folder / topic
        folder.mkdir()
        members = [Member(f"member-{each}", self._kind, topic, folder, self._endpoints) for each in range(count)]
        try:
            yield members
        finally:
            for member in members:
                member.close()

    def _after(
        self, event: str, members: list[Member], writer: Writer, concerned: Member, act: Callable[[], None]
    ) -> Waited:
        """Cause an event, and wait until its effects are over. The `concerned` member's partitions did not stay."""
        self._settled(members, writer)
        before, began = holders(members, time.time() - HOLDING_SECONDS), time.time()
        act()
        self._settled(members, writer)
        after = holders(members, began)
        found = together(members)
        found = found[found["at"] > began]
        stayed: list[float] = []
        moved: list[float] = []
        for partition in range(PARTITIONS):
            ours = found[found["partition"] == partition]
            _, first = np.unique(ours["offset"], return_index=True)
            waited = float((ours["at"] - np.maximum(ours["written"], began))[first].max())
            is_same = len(after[partition]) == 1 and after[partition] == before[partition] != {concerned.name}
            (stayed if is_same else moved).append(waited)
        return Waited(event, stayed, moved)

    def _settled(self, members: list[Member], writer: Writer) -> None:
        """Wait until all records were handed out, and the assignment has not changed for a while."""
        self._caught_up(members, writer)
        time.sleep(SETTLED_SECONDS)  # That nothing moves any more can only be waited for.
        self._caught_up(members, writer)

        def is_still() -> bool:
            time.sleep(HOLDING_SECONDS)
            held = holders(members, time.time() - HOLDING_SECONDS)
            return all(len(each) == 1 for each in held.values())

        eventually(is_still, PATIENCE_SECONDS)

    def _caught_up(self, members: list[Member], writer: Writer) -> None:
        """Wait until all that is written by now has been handed out."""
        due = writer.written

        def all_came() -> bool:
            time.sleep(0.2)
            found = together(members)
            return len(np.unique(found[["partition", "offset"]])) >= due

        eventually(all_came, PATIENCE_SECONDS)


def restart(member: Member) -> None:
    """Kill it, and start it again under the same name."""
    member.kill()
    member.start()


def together(members: Sequence[Member]) -> Records:
    """What all of them were handed, in time."""
    return np.sort(np.concatenate([member.records() for member in members]), order="at")


def holders(members: Sequence[Member], since: float) -> Mapping[int, set[str]]:
    """Which members were handed records of each partition since a time."""
    found: dict[int, set[str]] = {partition: set() for partition in range(PARTITIONS)}
    for member in members:
        records = member.records()
        for partition in np.unique(records["partition"][records["at"] > since]):
            found[int(partition)].add(member.name)
    return found


def create(endpoints: Endpoints, topic: str, partitions: int) -> None:
    """Make a topic, and wait until it is there."""
    admin = AdminClient({"bootstrap.servers": endpoints.bootstrap_servers})
    [made] = admin.create_topics([NewTopic(topic, num_partitions=partitions)]).values()
    made.result(60)
    eventually(lambda: topic in admin.list_topics(timeout=10).topics, 60)


@click.command()
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, default=KINDS, help="Only this way.")
@click.option("--many/--not-many", default=True, help="Share 1,000 partitions too.")
def main(kinds: tuple[str, ...], *, many: bool) -> None:
    """Compare ways to share a topic."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedStack(Path(folder) / "servers") as endpoints:
        migrate(Settings(dsn=endpoints.dsn, bootstrap_servers=endpoints.bootstrap_servers))
        click.echo(f"{'':26}{'longest wait of a record, in seconds (partitions)':>50}")
        click.echo(f"{'':26}{'':28}{'stayed':>14}{'others':>14}")
        for kind in kinds:
            comparison = Comparison(kind, endpoints, Path(folder))
            for waited in comparison.events():
                event, stayed, moved = waited.cells()
                click.echo(f"{kind:26}{event:28}{stayed:>14}{moved:>14}")
            if many:
                click.echo(f"{kind:26}{f'{MANY:,} partitions, 4 begin':28}{'':>14}{comparison.many():>14.1f}")


if __name__ == "__main__":
    main()
