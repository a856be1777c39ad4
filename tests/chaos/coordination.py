"""Consumers that share a topic, as processes that are killed, stopped and restarted; and a referee that counts.

`python -m tests.chaos.coordination` starts real servers, has ten instances share 64 partitions and a million records
for two minutes, once with each guarantee, and prints what became of the records. Handlers hold the interpreter for 7 s,
the instances' clocks differ by up to an hour, and halfway the topic gets more partitions. Then four instances share
1,000 partitions. Last, an operator pauses a group in full flow, sets its position, and resumes it. Exit code 1 if a
promise was broken.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from outbox_plugin.coordination import Admin
from outbox_plugin.embedded.stack import EmbeddedStack
from tests.chaos.coordination_referee import (
    SETTLE_SECONDS,
    Findings,
    Plan,
    Restart,
    Run,
    Strike,
    broken_promises,
    describe,
    events_of,
    handed_out,
    held,
    judge,
)
from tests.chaos.coordination_worker import HOLD_INTERVALS
from tests.support import eventually

PROMPT_SECONDS = 0.3
DRAIN_SECONDS = 240.0
MOVED: dict[str, Any] = {"records": 200_000, "seconds": 25.0, "added": 0}  # Enough to be paused in full flow.
MANY: dict[str, Any] = {"partitions": 1_000, "instances": 4, "interval": 10.0, "added": 0}
CLOCKS = (0.0, 3_600.0, -3_600.0, 7.3, -7.3)  # How many seconds the instances' clocks are ahead, in turn.


@dataclass(frozen=True)
class Moved:
    """The result of a pause, of setting each partition's position, and of a resume. Times are in seconds."""

    allowed: float
    stopped: float  # From the command to pause until the last record was handed out.
    partitions: int
    exact: int  # Partitions that went on at the offset that was set.


class Worker:
    """A client with successive processes. The next one waits with its imports done, so that they are not measured."""

    def __init__(self, number: int, plan: Plan, bootstrap_servers: str, topic: str, folder: Path) -> None:
        self.client = f"client-{number}"
        self.runs: list[Run] = []
        self.wakes = 0.0  # When it is to be started, or woken; 0 while it is undisturbed.
        self.woken = 0.0
        self.stopped = self.holds = False
        ahead = CLOCKS[number % len(CLOCKS)]
        self._arguments = [bootstrap_servers, topic, plan.guarantee, self.client, str(plan.interval), "--", str(ahead)]
        self._folder = folder
        self._next = self._spare()
        self.start()

    def _spare(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.chaos.coordination_worker", *self._arguments]
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
        """Let the waiting process begin, with files of this name; without a name, let it end."""
        assert process.stdin is not None
        process.stdin.write(line.encode())
        process.stdin.close()

    def close(self) -> None:
        """Kill the processes that are left."""
        self.kill()
        self._say(self._next, "")
        assert self._next.wait(60) == 0

    def has_begun(self) -> bool:
        """Whether it has had time to resume its claims, or to read what it has missed."""
        made = [event["at"] for event in events_of(self.runs[-1]) if event["kind"] == "made"]
        return any(time.time() - max(at, self.woken) > SETTLE_SECONDS for at in made)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(90)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self.stopped = True

    def hold(self) -> None:
        """Make its next handler hold the interpreter."""
        self._process.send_signal(signal.SIGUSR1)
        self.holds = True

    def wake(self) -> None:
        """Restart it if it was killed; resume it if it was stopped."""
        if not self.stopped and not self.holds:
            self.start()
            return
        if self.stopped:
            self._process.send_signal(signal.SIGCONT)
        self.stopped, self.holds, self.wakes, self.woken = False, False, 0.0, time.time()

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
    prompt: list[Restart] = []
    strikes: list[Strike] = []
    try:
        with ThreadPoolExecutor(plan.instances) as peers:
            _disturb(plan, workers, found, prompt, strikes, lambda: peers.submit(_read_log, bootstrap_servers, topic))
        writer.join()
        _drain(plan, bootstrap_servers, topic)
        codes = [worker.terminate() for worker in workers]
        assert codes == [0] * plan.instances, codes
    finally:
        for worker in workers:
            worker.close()
        writer.join()
    runs = [each for worker in workers for each in worker.runs]
    judge(plan, bootstrap_servers, topic, runs, prompt, strikes, found)
    found.seconds = time.monotonic() - began
    return found


def _create(bootstrap_servers: str, topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    config = {"message.timestamp.type": "LogAppendTime"}
    [made] = admin.create_topics([NewTopic(topic, num_partitions=partitions, config=config)]).values()
    made.result(60)
    eventually(lambda: topic in admin.list_topics(timeout=30).topics, 20)


def _write(plan: Plan, bootstrap_servers: str, topic: str) -> None:
    """All records, spread over the partitions, and over most of the time; the second half over more partitions."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, "linger.ms": 20})
    began, seconds = time.monotonic(), 0.8 * plan.seconds
    partitions = plan.partitions
    for number in range(plan.records):
        if number == plan.records // 2 and plan.added:
            partitions += plan.added
            _widen(bootstrap_servers, producer, topic, partitions)
        producer.produce(topic, b"%d" % number, partition=number % partitions)
        if number % 1_000 == 0:
            while len(producer) > 50_000:  # The broker is starved, too.
                producer.poll(0.1)
            producer.poll(0)
            time.sleep(max(0.0, began + seconds * number / plan.records - time.monotonic()))
    assert producer.flush(DRAIN_SECONDS) == 0
    producer.close()


def _widen(bootstrap_servers: str, producer: Producer, topic: str, partitions: int) -> None:
    """Add partitions to the topic, and wait until the producer knows them."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    [widened] = admin.create_partitions([NewPartitions(topic, partitions)]).values()
    widened.result(60)
    eventually(lambda: len(producer.list_topics(topic, timeout=10).topics[topic].partitions) == partitions, 60)


def _read_log(bootstrap_servers: str, topic: str) -> float:
    """The seconds in which a plain consumer starts and reads the coordination topic to its end."""
    began = time.monotonic()
    with closing(KafkaConsumer({"bootstrap.servers": bootstrap_servers, "group.id": "peer"})) as consumer:
        log = f"{topic}-claims"
        partitions = [TopicPartition(log, each, 0) for each in consumer.list_topics(log).topics[log].partitions]
        left = sum(consumer.get_watermark_offsets(each)[1] for each in partitions)
        consumer.assign(partitions)
        while left > 0:
            left -= len(consumer.consume(10_000, 1))
    return time.monotonic() - began


def _disturb(
    plan: Plan,
    workers: list[Worker],
    found: Findings,
    prompt: list[Restart],
    strikes: list[Strike],
    start_peer: Callable[[], Future[float]],
) -> None:
    """Kill, stop, hold, end and start again, at random, never more than half of them at a time."""
    dice = random.Random(plan.seed)
    eventually(lambda: all(held(worker.runs[-1]) for worker in workers), DRAIN_SECONDS)
    end = time.monotonic() + plan.seconds
    killed: dict[Worker, Run] = {}
    next_one = 0.0
    while time.monotonic() < end:
        for worker in workers:
            if worker.wakes and time.monotonic() > worker.wakes:
                worker.wake()
                if (before := killed.pop(worker, None)) is not None:
                    prompt.append(Restart(before, worker.runs[-1], start_peer()))
        if time.monotonic() > next_one and sum(bool(each.wakes) for each in workers) < plan.instances // 2:
            if not (calm := [each for each in workers if not each.wakes and each.has_begun()]):
                time.sleep(0.02)
                continue
            next_one = time.monotonic() + dice.uniform(0.3, 1.7)
            worker = dice.choice(calm)
            strikes.append(Strike(time.time(), worker.client))
            match dice.choices(["kill", "kill for long", "stop", "hold", "end"], [4, 2, 3, 2, 1])[0]:
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
                case "hold":
                    worker.hold()
                    found.holds += 1
                    worker.wakes = time.monotonic() + HOLD_INTERVALS * plan.interval + 1
                case _:
                    worker.terminate()
                    found.terminations += 1
                    worker.wakes = time.monotonic() + dice.uniform(0.1, 5)
        time.sleep(0.02)
    for worker in workers:
        if worker.wakes:
            worker.wake()


def _drain(plan: Plan, bootstrap_servers: str, topic: str) -> None:
    """Wait until, according to the log, all records are consumed."""
    admin = _admin(plan, bootstrap_servers, topic)

    def drained() -> bool:
        time.sleep(1)
        return sum(row.offset or 0 for row in admin.world(topic).rows) >= plan.records

    eventually(drained, DRAIN_SECONDS)


# The operator.


def move(plan: Plan, bootstrap_servers: str, folder: Path) -> Moved:
    """Pause a group in full flow, set the position of each partition, resume, and check the effect of each."""
    topic = f"moved-{int(time.time() * 1000)}"
    _create(bootstrap_servers, topic, plan.partitions)
    admin = _admin(plan, bootstrap_servers, topic)
    workers = [Worker(number, plan, bootstrap_servers, topic, folder) for number in range(plan.instances)]
    writer = threading.Thread(target=_write, args=(plan, bootstrap_servers, topic), name="outbox-writer")
    try:
        eventually(lambda: sum(len(held(each.runs[-1])) for each in workers) == plan.partitions, DRAIN_SECONDS)
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
    return np.concatenate([handed_out(run) for worker in workers for run in worker.runs])


def _admin(plan: Plan, bootstrap_servers: str, topic: str) -> Admin:
    return Admin(
        heartbeat_interval_seconds=plan.interval,
        coordination_topic=f"{topic}-claims",
        bootstrap_servers=bootstrap_servers,
    )


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
    """Let instances share a topic while they are killed and stopped, and print what became of its records."""
    if context.invoked_subcommand:
        return
    broken = False
    with tempfile.TemporaryDirectory() as folder, EmbeddedStack(Path(folder) / "servers") as endpoints:
        for each in ("at-least-once", "at-most-once") if guarantee == "both" else (guarantee,):
            out = Path(folder) / each
            out.mkdir()
            few = Plan(each, **plan)
            found = run(few, endpoints.bootstrap_servers, out)
            click.echo(f"{each}: {describe(found)}")
            broken |= bool(broken_promises(few, found))
            out.joinpath("many").mkdir()
            many = replace(few, **MANY)
            found = run(many, endpoints.bootstrap_servers, out / "many")
            click.echo(f"{each}, {many.partitions:,} partitions: {describe(found)}")
            broken |= bool(broken_promises(many, found))
        moved = move(Plan("at-least-once", **plan | MOVED), endpoints.bootstrap_servers, Path(folder))
        click.echo(
            f"paused in full flow: the last record came {moved.stopped:.2f} s after the order "
            f"(two heartbeats: {moved.allowed:g} s)\n"
            f"set and resumed: {moved.exact} of {moved.partitions} partitions went on at exactly the offset set"
        )
        broken |= moved.stopped > moved.allowed or moved.exact < moved.partitions
    sys.exit(broken)


if __name__ == "__main__":
    main()
