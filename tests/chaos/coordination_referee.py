"""The referee of the long run of consumers: what each process wrote, the log, and what became of the promises."""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import TopicPartition

from outbox_plugin.coordination import ClaimingPartition, Heartbeat, decode
from outbox_plugin.coordination.consumer import BATCH, Guarantee
from outbox_plugin.coordination.messages import coordination_partition

RECORDS = np.dtype([("partition", "<u2"), ("offset", "<u8"), ("at", "<f8")])
SETTLE_SECONDS = 2.0  # After which a process that has begun is disturbed again.
PEER_TIMES = 3  # A resumption asks Kafka for more than its peer does: for topics, positions, and to write its claims.


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
    added: int = 8  # Partitions that the topic gets when half of the records are written; 0: none.
    resume_seconds: float = 2.0  # A process that comes back in time has its claims so soon, on a machine that is idle.
    silent_intervals: float = 3.0  # For so long a partition may stand still after a fault.


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
    holds: int = 0
    terminations: int = 0

    @property
    def may_be_lost(self) -> int:
        """Records that may be lost at most once: what each killed, stopped or held process had fetched."""
        return BATCH * (self.kills + self.stops + self.holds)

    # Seconds from Consumer(…) until all its claims were back, and those that its peer needed.
    resumed: list[tuple[float, float]] = field(default_factory=list)
    not_resumed: int = 0
    longest_silence: float = 0.0  # Of a partition with records, since the last fault of its holder.
    silences: int = 0  # Of more than the plan's intervals.
    seconds: float = 0.0


class Strike(NamedTuple):
    """When something befell a client's process."""

    at: float
    client: str


class Run(NamedTuple):
    """One process: its client, and the files that it wrote."""

    client: str
    records: Path
    events: Path


class Restart(NamedTuple):
    """A process that was killed, and the one that was started in its place at once."""

    before: Run
    after: Run
    peer: Future[float]  # Seconds in which a plain consumer, started at the same time, read the log to its end.


def judge(
    plan: Plan,
    bootstrap_servers: str,
    topic: str,
    runs: list[Run],
    prompt: list[Restart],
    strikes: list[Strike],
    found: Findings,
) -> None:
    """Count all that can be found; `prompt`: the processes that were started again at once."""
    log = _log(bootstrap_servers, topic)
    _count(plan, log, runs, found)
    _judge_claims(plan, log, runs, found)
    _judge_restarts(plan, log, runs, prompt, found)
    _judge_silence(plan, log, runs, strikes, _written(bootstrap_servers, topic), found)


def events_of(run: Run) -> list[dict[str, Any]]:
    if not run.events.exists():
        return []
    return [json.loads(line) for line in run.events.read_text().splitlines() if line.endswith("}")]


def handed_out(run: Run) -> np.ndarray[Any, Any]:
    return np.fromfile(run.records, RECORDS) if run.records.exists() else np.empty(0, RECORDS)


def _count(plan: Plan, log: dict[int, Spoken], runs: list[Run], found: Findings) -> None:
    """What was lost, what was repeated, and what came out of order within a claim."""
    by_run = [handed_out(each) for each in runs]
    everything = np.concatenate(by_run)
    numbers = everything["partition"].astype(np.int64) * 2**40 + everything["offset"].astype(np.int64)
    distinct = np.unique(numbers)
    found.delivered = len(numbers)
    found.lost = plan.records - len(distinct)
    found.repeated = len(numbers) - len(distinct)
    for run, records in zip(runs, by_run, strict=True):
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
    for event in events_of(run):
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


def _words(log: dict[int, Spoken]) -> dict[tuple[str, int], list[float]]:
    """When each instance said that it lives, for each partition, in order."""
    words: dict[tuple[str, int], list[float]] = defaultdict(list)
    for each in log.values():
        if each.lives:
            words[each.instance, each.partition].append(each.at)
    return words


def stale_at(words: list[float], begin: float, others: list[float], interval: float) -> float:
    """When one who held a partition since `begin` was stale: two intervals after its last word that counted.

    Who was stopped for longer speaks before it has read what it has missed. Such a word counts for nothing where one of
    `others` took the partition meanwhile.
    """
    until = begin + 2 * interval
    for at in words:
        if at > until and any(until < taken <= at for taken in others):
            break
        if at >= begin:
            until = max(until, at + 2 * interval)
    return until


def _stale_at(plan: Plan, log: dict[int, Spoken], runs: list[Run]) -> dict[tuple[str, int], float]:
    """For each instance, and offset in the log of what gave it a partition: when it was stale there."""
    words = _words(log)
    takes: dict[int, list[tuple[float, str]]] = defaultdict(list)
    terms = [term for run in runs for term in _terms(run)]
    for term in terms:
        takes[term.partition].append((log[term.gained].at, log[term.gained].instance))
    found = {}
    for term in terms:
        gained = log[term.gained]
        others = [at for at, instance in takes[term.partition] if instance != gained.instance]
        ours = words[gained.instance, term.partition]
        found[gained.instance, term.gained] = stale_at(ours, gained.at, others, plan.interval)
    return found


def _judge_claims(plan: Plan, log: dict[int, Spoken], runs: list[Run], found: Findings) -> None:
    """Whether two live instances held a partition at any time of the log: each from the message that gave it to one,
    until it gave it up or saw it gone, or had been silent there for two intervals.
    """
    stale = _stale_at(plan, log, runs)
    holds: dict[int, list[_Held]] = defaultdict(list)
    took: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for run in runs:
        for partition, gained, lost, _ in _terms(run):
            silent = stale[log[gained].instance, gained]
            holds[partition].append(_Held(log[gained].at, silent, gained, lost, run.client))
            took[partition].append((log[gained].at, run.records.name))
            found.claims += 1
    found.two_holders = sum(_overlaps(terms) for terms in holds.values())
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
    records = handed_out(run)
    for partition in np.unique(records["partition"]):
        takes = sorted(took[int(partition)])
        times = np.array([at for at, _ in takes])
        ours = np.array([name == run.records.name for _, name in takes])
        at = records["at"][records["partition"] == partition]
        holder = np.searchsorted(times, at, side="right") - 1
        late += int((~ours[np.maximum(holder, 0)]).sum())
    return late


def _judge_restarts(
    plan: Plan, log: dict[int, Spoken], runs: list[Run], prompt: list[Restart], found: Findings
) -> None:
    """How long a process that came back took to have all that its client held when it was killed.

    Only where it came back in time: when it should have them, what it held was not stale yet.
    """
    stale = _stale_at(plan, log, runs)
    for before, after, peer in prompt:
        up = next((event["at"] for event in events_of(after) if event["kind"] == "up"), float("inf"))
        wanted = {
            partition
            for partition, gained in held(before).items()
            if stale[log[gained].instance, gained] > up + plan.resume_seconds
        }
        back = {term.partition: term.told for term in sorted(_terms(after), key=lambda term: -term.told)}
        if wanted and wanted <= back.keys():
            last = max(back[partition] for partition in wanted)
            found.resumed.append((last - up, peer.result()))
        elif wanted:
            found.not_resumed += 1


def held(run: Run) -> dict[int, int]:
    """What the process holds, or held when it was killed: partition -> offset in the log of what gave it to it."""
    return {term.partition: term.gained for term in _terms(run) if term.lost is None}


def _written(bootstrap_servers: str, topic: str) -> dict[int, np.ndarray[Any, Any]]:
    """When each record of the topic was appended, by partition and offset."""
    config: dict[str, Any] = {"bootstrap.servers": bootstrap_servers, "group.id": "referee"}
    with closing(KafkaConsumer(config)) as consumer:
        numbers = consumer.list_topics(topic).topics[topic].partitions
        ends = {each: consumer.get_watermark_offsets(TopicPartition(topic, each))[1] for each in numbers}
        consumer.assign([TopicPartition(topic, each, 0) for each in numbers])
        written = {each: np.zeros(end) for each, end in ends.items()}
        left = sum(ends.values())
        while left:
            for record in consumer.consume(10_000, 1):
                assert record.error() is None, record.error()
                written[record.partition() or 0][record.offset() or 0] = record.timestamp()[1] / 1000
                left -= 1
    return written


def _judge_silence(
    plan: Plan,
    log: dict[int, Spoken],
    runs: list[Run],
    strikes: list[Strike],
    written: dict[int, np.ndarray[Any, Any]],
    found: Findings,
) -> None:
    """For how long partitions that had records stood still; what befalls a holder begins the time anew."""
    everything = np.sort(np.concatenate([handed_out(each) for each in runs]), order="at")
    takes: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for run in runs:
        for term in _terms(run):
            takes[term.partition].append((log[term.gained].at, run.client))
    for partition, appended in written.items():
        ours = everything[everything["partition"] == partition]
        appended = np.maximum(appended, strikes[0].at if strikes else 0.0)  # By then all have begun.
        for begin, end in silences(ours, appended, at_most_once=plan.guarantee == "at-most-once"):
            struck = [at for at, client in strikes if begin < at < end and _holder(takes[partition], at) == client]
            silence = end - max([begin, *struck])
            found.longest_silence = max(found.longest_silence, silence)
            found.silences += silence > plan.silent_intervals * plan.interval


def silences(
    ours: np.ndarray[Any, Any], appended: np.ndarray[Any, Any], *, at_most_once: bool
) -> list[tuple[float, float]]:
    """From when until when a partition that had records stood still, for more than a second.

    Args:
        ours: what was handed out of it, in time.
        appended: when each of its records was.
        at_most_once: what was lost with a process is nobody's to hand out; so only what came says that something was
            waiting.
    """
    if not len(ours):
        return []
    offsets = ours["offset"].astype(np.int64)
    if at_most_once:
        awaited = offsets
    else:
        awaited = np.minimum(np.concatenate([[0], np.maximum.accumulate(offsets)[:-1] + 1]), len(appended))
    waiting_since = np.append(appended, np.inf)[awaited]
    begins = np.maximum(waiting_since, np.concatenate([[0.0], ours["at"][:-1]]))
    return [(b, e) for b, e in zip(begins.tolist(), ours["at"].tolist(), strict=True) if e - b > 1]


def _holder(takes: list[tuple[float, str]], at: float) -> str:
    """The client that was the last to take a partition before a time."""
    return max(((taken, client) for taken, client in takes if taken <= at), default=(0.0, ""))[1]


def broken_promises(plan: Plan, found: Findings) -> list[str]:
    """What must not be, and is."""
    wrong = {
        "lost": found.lost if plan.guarantee == "at-least-once" else max(0, found.lost - found.may_be_lost),
        "repeated": found.repeated if plan.guarantee == "at-most-once" else 0,
        "out of order": found.out_of_order,
        "two live holders": found.two_holders,
        "silent for too long": found.silences,
        "not resumed": found.not_resumed,
        "resumed late": sum(seconds > plan.resume_seconds + PEER_TIMES * peer for seconds, peer in found.resumed),
    }
    return [f"{name}: {count}" for name, count in wrong.items() if count]


def describe(found: Findings) -> str:
    """The figures, in lines."""
    resumed, peers = zip(*found.resumed, strict=True) if found.resumed else ((), ())
    worst = (
        f"{max(resumed):.2f} s at most, {np.median(resumed):.2f} in the median (plain consumers that read their log: "
        f"{max(peers):.2f}, {np.median(peers):.2f})"
        if resumed
        else "none"
    )
    return "\n".join(
        [
            f"{found.records:,} records, {found.delivered:,} handed out in {found.seconds:.0f} s",
            f"  lost {found.lost:,}, repeated {found.repeated:,}, out of order within a claim {found.out_of_order:,}",
            f"  {found.kills} kills, {found.stops} stops past two heartbeats, {found.holds} held interpreters, "
            f"{found.terminations} clean ends",
            f"  the longest silence of a partition after a fault: {found.longest_silence:.1f} s",
            f"  {found.claims:,} claims, {found.two_holders} with two live holders; "
            f"{found.after_anothers_claim} records handed out when another had the partition",
            f"  {len(found.resumed)} prompt restarts had their claims back: {worst}; {found.not_resumed} had not",
        ]
    )
