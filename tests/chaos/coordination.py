"""Consumers that share a topic, as processes that are killed, stopped and started again; and a referee who counts.

`python -m tests.chaos.coordination` starts real servers, has ten instances share 64 partitions and a million records
for two minutes, once with each guarantee, and says what became of them. At last an operator pauses a group in full
flow, sets its position, and resumes it. Exit code 1 when a promise was broken.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from outbox_plugin.coordination import Admin, ClaimingPartition, Consumer, Heartbeat, decode
from outbox_plugin.coordination.consumer import Guarantee
from outbox_plugin.coordination.events import ClaimEvent, ClaimGained
from outbox_plugin.coordination.messages import coordination_partition
from outbox_plugin.embedded.stack import EmbeddedStack
from tests.support import PATIENCE, eventually

RECORD = struct.Struct("<HQd")  # Partition, offset, and when it was handed out.
RECORDS = np.dtype([("partition", "<u2"), ("offset", "<u8"), ("at", "<f8")])
PROMPT_SECONDS = 0.3
RESUME_SECONDS = 2.0 * PATIENCE
DRAIN_SECONDS = 240.0
MOVED = {"records": 200_000, "seconds": 25.0}  # Enough to be paused in full flow.


@dataclass(frozen=True)
class Plan:
    """What is run. Times are seconds; a stopped process sleeps for more than two heartbeat intervals."""

    guarantee: Guarantee
    instances: int = 10
    partitions: int = 64
    records: int = 1_000_000
    seconds: float = 120.0
    interval: float = 3.0
    seed: int = 1


@dataclass
class Findings:
    """What the referee found."""

    records: int = 0
    delivered: int = 0
    lost: int = 0
    repeated: int = 0
    out_of_order: int = 0
    claims: int = 0
    two_holders: int = 0
    after_anothers_claim: int = 0
    kills: int = 0
    stops: int = 0
    terminations: int = 0
    resumed: list[float] = field(default_factory=list)  # Seconds from Consumer(…) until all its claims were back.
    not_resumed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Moved:
    """What a pause, a position for each partition, and a resume brought about. Times are seconds."""

    allowed: float
    stopped: float  # From the order to pause until the last record was handed out.
    partitions: int
    exact: int  # Partitions that went on at the offset that was set.


class Run(NamedTuple):
    """One process: its client, and the files that it wrote."""

    client: str
    records: Path
    events: Path


# One process.


def work(bootstrap_servers: str, topic: str, guarantee: Guarantee, client: str, interval: float, out: Path) -> None:
    """Consume until SIGTERM; each record, and each claim, is in a file before anything else happens."""
    records = os.open(f"{out}.records", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    events = os.open(f"{out}.events", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def tell(**what: Any) -> None:
        os.write(events, (json.dumps({"at": time.time(), **what}) + "\n").encode())

    def observe(event: ClaimEvent) -> None:
        kind = "gained" if isinstance(event, ClaimGained) else "lost"
        tell(kind=kind, partition=event.place.partition, log_offset=event.log_offset)

    tell(kind="up")
    with Consumer(
        [topic],
        topic,
        client,
        guarantee,
        heartbeat_interval_seconds=interval,
        coordination_topic=f"{topic}-claims",
        bootstrap_servers=bootstrap_servers,
        observe=observe,
    ) as consumer:
        signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
        tell(kind="made", instance=consumer.instance_id)
        for message in consumer:
            os.write(records, RECORD.pack(message.partition(), message.offset(), time.time()))
            consumer.commit(message)


class Worker:
    """A client whose processes come and go. The next one waits, its imports done: Python's start is not our subject."""

    def __init__(self, number: int, plan: Plan, bootstrap_servers: str, topic: str, folder: Path) -> None:
        self.client = f"client-{number}"
        self.runs: list[Run] = []
        self.wakes = 0.0  # When it is to be started, or woken; 0 while it is undisturbed.
        self.stopped = False
        self._arguments = [bootstrap_servers, topic, plan.guarantee, self.client, str(plan.interval)]
        self._folder = folder
        self._next = self._spare()
        self.start()

    def _spare(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.chaos.coordination", "worker", *self._arguments]
        with (self._folder / f"{self.client}.log").open("ab") as log:
            checkout = Path(__file__).parents[2]
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=checkout)

    def start(self) -> None:
        out = self._folder / f"{self.client}-{len(self.runs)}"
        self.runs.append(Run(self.client, Path(f"{out}.records"), Path(f"{out}.events")))
        self._process, self._next = self._next, self._spare()
        self._say(self._process, str(out))
        self.wakes = 0.0

    @staticmethod
    def _say(process: subprocess.Popen[bytes], line: str) -> None:
        """Have it begin, with files of this name; without one, end."""
        assert process.stdin is not None
        process.stdin.write(line.encode())
        process.stdin.close()

    def close(self) -> None:
        """End all that is left of it."""
        self.kill()
        self._say(self._next, "")
        assert self._next.wait(60) == 0

    def has_begun(self) -> bool:
        """Whether it has had time to go on with what was its own."""
        made = [event["at"] for event in _events(self.runs[-1]) if event["kind"] == "made"]
        return any(time.time() - at > RESUME_SECONDS for at in made)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(20)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self.stopped = True

    def wake(self) -> None:
        """Start it again, or let it go on."""
        if self.stopped:
            self._process.send_signal(signal.SIGCONT)
            self.stopped, self.wakes = False, 0.0
        else:
            self.start()

    def terminate(self) -> int:
        """End it cleanly, once it has begun."""
        eventually(self.has_begun, DRAIN_SECONDS)
        self._process.terminate()
        return self._process.wait(60)


# The run.


def run(plan: Plan, bootstrap_servers: str, folder: Path) -> Findings:
    """Carry out `plan`, with new topics, and judge."""
    began = time.monotonic()
    topic = f"shared-{plan.guarantee}-{int(time.time() * 1000)}"
    _create(bootstrap_servers, topic, plan.partitions)
    found = Findings(records=plan.records)
    workers = [Worker(number, plan, bootstrap_servers, topic, folder) for number in range(plan.instances)]
    writer = threading.Thread(target=_write, args=(plan, bootstrap_servers, topic), name="outbox-writer")
    writer.start()
    prompt: list[tuple[Run, Run]] = []
    try:
        _disturb(plan, workers, found, prompt)
        writer.join()
        _drain(plan, bootstrap_servers, topic)
        codes = [worker.terminate() for worker in workers]
        assert codes == [0] * plan.instances, codes
    finally:
        for worker in workers:
            worker.close()
        writer.join()
    runs = [each for worker in workers for each in worker.runs]
    log = _log(bootstrap_servers, topic)
    _count(plan, log, runs, found)
    _judge_claims(plan, log, runs, found)
    _judge_restarts(plan, log, prompt, found)
    found.seconds = time.monotonic() - began
    return found


def _create(bootstrap_servers: str, topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    [made] = admin.create_topics([NewTopic(topic, num_partitions=partitions)]).values()
    made.result(20)
    eventually(lambda: topic in admin.list_topics(timeout=10).topics, 20)


def _write(plan: Plan, bootstrap_servers: str, topic: str) -> None:
    """All records, spread over the partitions, and over most of the time."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, "linger.ms": 20})
    began, seconds = time.monotonic(), 0.8 * plan.seconds
    for number in range(plan.records):
        producer.produce(topic, b"%d" % number, partition=number % plan.partitions)
        if number % 1_000 == 0:
            while len(producer) > 50_000:  # The broker is starved, too.
                producer.poll(0.1)
            producer.poll(0)
            time.sleep(max(0.0, began + seconds * number / plan.records - time.monotonic()))
    assert producer.flush(DRAIN_SECONDS) == 0
    producer.close()


def _disturb(plan: Plan, workers: list[Worker], found: Findings, prompt: list[tuple[Run, Run]]) -> None:
    """Kill, stop, end and start again, at random, never more than half of them at a time."""
    dice = random.Random(plan.seed)
    eventually(lambda: all(_held(worker.runs[-1]) for worker in workers), DRAIN_SECONDS)
    end = time.monotonic() + plan.seconds
    killed: dict[Worker, Run] = {}
    next_one = 0.0
    while time.monotonic() < end:
        for worker in workers:
            if worker.wakes and time.monotonic() > worker.wakes:
                worker.wake()
                if (before := killed.pop(worker, None)) is not None:
                    prompt.append((before, worker.runs[-1]))
        if time.monotonic() > next_one and sum(bool(each.wakes) for each in workers) < plan.instances // 2:
            if not (calm := [each for each in workers if not each.wakes and each.has_begun()]):
                continue
            next_one = time.monotonic() + dice.uniform(0.3, 1.7)
            worker = dice.choice(calm)
            match dice.choices(["kill", "kill for long", "stop", "end"], [4, 2, 3, 1])[0]:
                case "kill":
                    killed[worker] = worker.runs[-1]
                    worker.kill()
                    found.kills += 1
                    worker.wakes = time.monotonic() + PROMPT_SECONDS
                case "kill for long":
                    worker.kill()
                    found.kills += 1
                    worker.wakes = time.monotonic() + dice.uniform(1, 4) * plan.interval
                case "stop":
                    worker.stop()
                    found.stops += 1
                    worker.wakes = time.monotonic() + dice.uniform(2.2, 4) * plan.interval
                case _:
                    worker.terminate()
                    found.terminations += 1
                    worker.wakes = time.monotonic() + dice.uniform(0.1, 5)
        time.sleep(0.02)
    for worker in workers:
        if worker.wakes:
            worker.wake()


def _drain(plan: Plan, bootstrap_servers: str, topic: str) -> None:
    """Wait until the log says that all is consumed."""
    admin = _admin(plan, bootstrap_servers, topic)

    def drained() -> bool:
        time.sleep(1)
        return sum(row.offset or 0 for row in admin.world(topic).rows) >= plan.records

    eventually(drained, DRAIN_SECONDS)


# The operator.


def move(plan: Plan, bootstrap_servers: str, folder: Path) -> Moved:
    """Pause a group in full flow, set the position of each partition, resume, and look what each did."""
    topic = f"moved-{int(time.time() * 1000)}"
    _create(bootstrap_servers, topic, plan.partitions)
    admin = _admin(plan, bootstrap_servers, topic)
    workers = [Worker(number, plan, bootstrap_servers, topic, folder) for number in range(plan.instances)]
    writer = threading.Thread(target=_write, args=(plan, bootstrap_servers, topic), name="outbox-writer")
    try:
        eventually(lambda: sum(len(_held(each.runs[-1])) for each in workers) == plan.partitions, DRAIN_SECONDS)
        writer.start()
        eventually(lambda: len(_all_handed_out(workers)) > plan.records / 5, DRAIN_SECONDS)
        ordered = time.time()
        admin.pause(topic)
        time.sleep(3 * plan.interval)  # That nothing comes can only be waited for.
        last = _all_handed_out(workers)["at"].max()
        dice = random.Random(plan.seed)
        positions = {row.key.partition: dice.randint(0, row.offset or 0) for row in admin.world(topic).rows}
        admin.set_position(topic, {(topic, partition): offset for partition, offset in positions.items()})
        resumed = time.time()
        admin.resume(topic)
        writer.join()
        first: dict[int, int] = {}  # Where each partition went on.

        def all_went_on() -> bool:
            found = np.sort(_all_handed_out(workers), order="at")
            for partition, offset, at in found.tolist():
                if at > resumed:
                    first.setdefault(partition, offset)
            return len(first) == plan.partitions

        eventually(all_went_on, DRAIN_SECONDS)
        assert [worker.terminate() for worker in workers] == [0] * plan.instances
    finally:
        for worker in workers:
            worker.close()
        if writer.is_alive():
            writer.join()
    exact = sum(first[partition] == offset for partition, offset in positions.items())
    return Moved(2 * plan.interval, last - ordered, plan.partitions, exact)


def _all_handed_out(workers: list[Worker]) -> np.ndarray[Any, Any]:
    return np.concatenate([_handed_out(run) for worker in workers for run in worker.runs])


def _admin(plan: Plan, bootstrap_servers: str, topic: str) -> Admin:
    return Admin(
        heartbeat_interval_seconds=plan.interval,
        coordination_topic=f"{topic}-claims",
        bootstrap_servers=bootstrap_servers,
    )


# The referee.


def _events(run: Run) -> list[dict[str, Any]]:
    if not run.events.exists():
        return []
    return [json.loads(line) for line in run.events.read_text().splitlines() if line.endswith("}")]


def _handed_out(run: Run) -> np.ndarray[Any, Any]:
    return np.fromfile(run.records, RECORDS) if run.records.exists() else np.empty(0, RECORDS)


def _count(plan: Plan, log: dict[int, Spoken], runs: list[Run], found: Findings) -> None:
    """What was lost, what was repeated, and what came out of order within a claim."""
    handed_out = [_handed_out(each) for each in runs]
    everything = np.concatenate(handed_out)
    numbers = everything["partition"].astype(np.int64) * 2**40 + everything["offset"].astype(np.int64)
    distinct = np.unique(numbers)
    found.delivered = len(numbers)
    found.lost = plan.records - len(distinct)
    found.repeated = len(numbers) - len(distinct)
    for run, records in zip(runs, handed_out, strict=True):
        gains: dict[int, list[float]] = defaultdict(list)
        for term in _terms(run):
            gains[term.partition].append(log[term.gained].at)
        for partition, begins in gains.items():
            ours = records[records["partition"] == partition]
            for begin, end in zip(begins, [*begins[1:], float("inf")], strict=True):
                offsets = ours["offset"][(ours["at"] >= begin) & (ours["at"] < end)].astype(np.int64)
                found.out_of_order += int((np.diff(offsets) <= 0).sum())


class Term(NamedTuple):
    """A claim that a process says it had: from and until which offset of the log, and when it said so."""

    partition: int
    gained: int
    lost: int | None
    told: float


def _terms(run: Run) -> list[Term]:
    terms: list[Term] = []
    open_: dict[int, Term] = {}
    for event in _events(run):
        if event["kind"] == "gained":
            open_[event["partition"]] = Term(event["partition"], event["log_offset"], None, event["at"])
        elif event["kind"] == "lost":
            terms.append(open_.pop(event["partition"])._replace(lost=event["log_offset"]))
    return [*terms, *open_.values()]


class Spoken(NamedTuple):
    """A message of the log: who, what about, whether it shows that its sender lives, and when it was appended."""

    instance: str
    partition: int
    lives: bool
    at: float


def _log(bootstrap_servers: str, topic: str) -> dict[int, Spoken]:
    """The coordination topic from its beginning, by offset."""
    claims = f"{topic}-claims"
    config: dict[str, Any] = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": "referee",
        "enable.auto.commit": False,
    }
    with closing(KafkaConsumer(config)) as consumer:
        [partitions] = (len(each.partitions) for each in consumer.list_topics(claims).topics.values())
        partition = coordination_partition(topic, partitions)
        _, end = consumer.get_watermark_offsets(TopicPartition(claims, partition))
        consumer.assign([TopicPartition(claims, partition, 0)])
        log: dict[int, Spoken] = {}
        while len(log) < end:
            for record in consumer.consume(10_000, 1):
                message = decode(record.value())
                at = record.timestamp()[1] / 1000
                lives = isinstance(message, Heartbeat | ClaimingPartition)
                log[record.offset() or 0] = Spoken(message.instance_id, message.partition, lives, at)
    return log


def _last_words(log: dict[int, Spoken]) -> dict[tuple[str, int], float]:
    """When each instance last said that it lives, for each partition."""
    return {(each.instance, each.partition): each.at for each in log.values() if each.lives}


def _judge_claims(plan: Plan, log: dict[int, Spoken], runs: list[Run], found: Findings) -> None:
    """Whether two live instances held a partition at any time of the log: each from the message that gave it to one,
    until it gave it up or saw it gone, or had been silent there for two intervals.
    """
    last_words = _last_words(log)
    held: dict[int, list[_Held]] = defaultdict(list)
    took: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for run in runs:
        for partition, gained, lost, _ in _terms(run):
            silent = last_words[log[gained].instance, partition] + 2 * plan.interval
            held[partition].append(_Held(log[gained].at, silent, gained, lost, run.client))
            took[partition].append((log[gained].at, run.records.name))
            found.claims += 1
    found.two_holders = sum(_overlaps(terms) for terms in held.values())
    found.after_anothers_claim = sum(_late(run, took) for run in runs)


class _Held(NamedTuple):
    """How long a client held a partition: the times of what gave it and of its last word, and both ends in the log."""

    begin: float
    end: float
    gained: int
    lost: int | None
    client: str


def _overlaps(terms: list[_Held]) -> int:
    """How often one began before another's had ended, in the log's order; a next run ends what its client held."""
    overlaps = 0
    for other in terms:
        resumed = [each.gained for each in terms if each.client == other.client and each.gained > other.gained]
        given_up = min([*resumed, float("inf") if other.lost is None else other.lost])
        overlaps += sum(
            other.gained < term.gained < given_up and term.begin < other.end
            for term in terms
            if term.client != other.client
        )
    return overlaps


def _late(run: Run, took: dict[int, list[tuple[float, str]]]) -> int:
    """Records that a process had in hand when it was stopped, and handed out when another had the partition."""
    late = 0
    records = _handed_out(run)
    for partition in np.unique(records["partition"]):
        takes = sorted(took[int(partition)])
        times = np.array([at for at, _ in takes])
        ours = np.array([name == run.records.name for _, name in takes])
        at = records["at"][records["partition"] == partition]
        holder = np.searchsorted(times, at, side="right") - 1
        late += int((~ours[np.maximum(holder, 0)]).sum())
    return late


def _judge_restarts(plan: Plan, log: dict[int, Spoken], prompt: list[tuple[Run, Run]], found: Findings) -> None:
    """How long a process that came back took to have all that its client held when it was killed.

    Only where it came back in time: two seconds later, what it held was not stale yet.
    """
    last_words = _last_words(log)
    for before, after in prompt:
        up = next((event["at"] for event in _events(after) if event["kind"] == "up"), float("inf"))
        wanted = {
            partition
            for partition, gained in _held(before).items()
            if last_words[log[gained].instance, partition] + 2 * plan.interval > up + RESUME_SECONDS
        }
        back = {term.partition: term.told for term in sorted(_terms(after), key=lambda term: -term.told)}
        if wanted and wanted <= back.keys():
            last = max(back[partition] for partition in wanted)
            found.resumed.append(last - up)
        elif wanted:
            found.not_resumed += 1


def _held(run: Run) -> dict[int, int]:
    """What the process holds, or held when it was killed: partition -> offset in the log of what gave it to it."""
    return {term.partition: term.gained for term in _terms(run) if term.lost is None}


# The command.


@click.group(invoke_without_command=True)
@click.option("--guarantee", type=click.Choice(["at-least-once", "at-most-once", "both"]), default="both")
@click.option("--instances", default=10, show_default=True)
@click.option("--partitions", default=64, show_default=True)
@click.option("--records", default=1_000_000, show_default=True)
@click.option("--seconds", default=120.0, show_default=True)
@click.option("--interval", default=3.0, show_default=True, help="Between heartbeats, in seconds.")
@click.option("--seed", default=1, show_default=True)
@click.pass_context
def main(context: click.Context, /, guarantee: str, **plan: Any) -> None:
    """Have instances share a topic while they are killed and stopped, and say what became of its records."""
    if context.invoked_subcommand:
        return
    broken = False
    with tempfile.TemporaryDirectory() as folder, EmbeddedStack(Path(folder) / "servers") as endpoints:
        for each in ("at-least-once", "at-most-once") if guarantee == "both" else (guarantee,):
            out = Path(folder) / each
            out.mkdir()
            found = run(Plan(each, **plan), endpoints.bootstrap_servers, out)
            click.echo(f"{each}: {describe(found)}")
            broken |= bool(broken_promises(each, found))
        moved = move(Plan("at-least-once", **plan | MOVED), endpoints.bootstrap_servers, Path(folder))
        click.echo(
            f"paused in full flow: the last record came {moved.stopped:.2f} s after the order "
            f"(two heartbeats: {moved.allowed:g} s)\n"
            f"set and resumed: {moved.exact} of {moved.partitions} partitions went on at exactly the offset set"
        )
        broken |= moved.stopped > moved.allowed or moved.exact < moved.partitions
    sys.exit(broken)


def broken_promises(guarantee: str, found: Findings) -> list[str]:
    """What must not be, and is."""
    wrong = {
        "lost": found.lost if guarantee == "at-least-once" else 0,
        "repeated": found.repeated if guarantee == "at-most-once" else 0,
        "out of order": found.out_of_order,
        "two live holders": found.two_holders,
        "not resumed": found.not_resumed,
        "resumed late": sum(seconds > RESUME_SECONDS for seconds in found.resumed),
    }
    return [f"{name}: {count}" for name, count in wrong.items() if count]


def describe(found: Findings) -> str:
    """The figures, in lines."""
    worst = (
        f"{max(found.resumed):.2f} s at most, {np.median(found.resumed):.2f} in the median" if found.resumed else "none"
    )
    return "\n".join(
        [
            f"{found.records:,} records, {found.delivered:,} handed out in {found.seconds:.0f} s",
            f"  lost {found.lost:,}, repeated {found.repeated:,}, out of order within a claim {found.out_of_order:,}",
            f"  {found.kills} kills, {found.stops} stops past two heartbeats, {found.terminations} clean ends",
            f"  {found.claims:,} claims, {found.two_holders} with two live holders; "
            f"{found.after_anothers_claim} records handed out when another had the partition",
            f"  {len(found.resumed)} prompt restarts had their claims back: {worst}; {found.not_resumed} had not",
        ]
    )


@main.command()
@click.argument("bootstrap_servers")
@click.argument("topic")
@click.argument("guarantee")
@click.argument("client")
@click.argument("interval", type=float)
def worker(**given: Any) -> None:
    """One process, which waits for its file's name (used by the run)."""
    if out := sys.stdin.read():
        work(**given, out=Path(out))


if __name__ == "__main__":
    main()
