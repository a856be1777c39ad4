"""The plan of a schedule, drawn from its seed before it begins: its size and its faults."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from outbox_plugin.core.delivery_options import BadRows, Delivery
from tests.simulation.network import MISHAPS

CreateTimes = Literal["now", "by the second", "the same"]  # What applications write into that column.

# The faults that a schedule can have, at a moment or for a while.
KILL, STOP, PAUSE, JUMP = "kill", "stop", "pause", "clock jumps ahead"
HELD = "a broker answers all harvesters but one"
NO_KAFKA, NO_POSTGRES = "cut off from Kafka", "cut off from Postgres"
KAFKA_DOWN, POSTGRES_DOWN = "Kafka is down", "Postgres is down"
TRUNCATE, RESTORE, RESTORE_ANEW = "truncate", "restore a backup", "restore a backup into a new table"
RESHARD, HALT = "another number of shards", "paused by an order"
WALL_CLOCK_BACK = "Postgres' clock jumps back"
BAD_EVENT, BAD_TOPIC = "a row that Kafka refuses", "a topic that Kafka refuses"
NO_LEADER = "a partition without a leader"
OWN_ID = "a row with an id of its own making"
REWRITE, UPDATE, DELETE = "a migration rewrites the table", "rows are updated", "rows are deleted by somebody else"
WRAP = "2^31 transactions pass"
TRUNCATE_ONLY, SET_BACK = "truncate, ids going on", "the sequence is set back"
RESTORE_WITH_CLOCK = "restore a backup, and its clock"
LOCK = "the table is locked"
HOSTILE = "somebody writes to the control topics"
FAIL_OVER, FAIL_OVER_ASYNC = "fail-over to a synchronous standby", "fail-over to an asynchronous standby"
BATCH = "a batch of many rows"
EMPTIED = "somebody deletes the leader topic's records"
OTHER_DELIVERY, OTHER_GROUP = "the other delivery adopts the outbox", "another group adopts the outbox"
EVERYTHING = (
    KILL,
    STOP,
    PAUSE,
    JUMP,
    NO_KAFKA,
    NO_POSTGRES,
    KAFKA_DOWN,
    POSTGRES_DOWN,
    TRUNCATE,
    RESTORE,
    RESTORE_ANEW,
    RESHARD,
    HALT,
    WALL_CLOCK_BACK,
    BAD_EVENT,
    BAD_TOPIC,
    NO_LEADER,
    OWN_ID,
    REWRITE,
    UPDATE,
    DELETE,
    WRAP,
    TRUNCATE_ONLY,
    SET_BACK,
    RESTORE_WITH_CLOCK,
    LOCK,
    FAIL_OVER,
    FAIL_OVER_ASYNC,
    HOSTILE,
    OTHER_DELIVERY,
    OTHER_GROUP,
    BATCH,
)
# After these, ids may be reused: only the time of creation distinguishes a row from an earlier one with its id.
GIVES_IDS_AGAIN = (RESTORE, RESTORE_WITH_CLOCK, SET_BACK, FAIL_OVER_ASYNC)
AIMS = (
    "fences",
    "begins",
    "raises",
    "reads",
    "produces",
    "commits",
    "adds",
    "purges",
    "recovers",
    "parks",
    "dead_letters",
    "marks",
    "sends",
    "deletes",
    "resets",
    "asks",
    "settles",
    "confirms",
)
_OF_ONE = (KILL, STOP, PAUSE, JUMP, NO_KAFKA, NO_POSTGRES)
THEMES = (
    (BAD_TOPIC, BAD_TOPIC, BAD_EVENT, BAD_EVENT),
    (RESHARD, RESHARD, RESHARD, RESTORE),
    (PAUSE, PAUSE, PAUSE, KILL),
    (KILL, KILL, KILL, POSTGRES_DOWN),
    (HOSTILE, HOSTILE, KILL, KILL),
    (NO_KAFKA, NO_POSTGRES, NO_KAFKA, NO_POSTGRES, KAFKA_DOWN),
    (REWRITE, UPDATE, WRAP, KILL),
    (NO_LEADER, NO_LEADER, KILL, PAUSE),
    (FAIL_OVER, FAIL_OVER_ASYNC, LOCK, KILL),
    (OTHER_DELIVERY, OTHER_GROUP, PAUSE, PAUSE),
    (BATCH, BATCH, BATCH, KILL),
    (BATCH, BATCH, BAD_EVENT, BAD_TOPIC),
    (BATCH, BATCH, SET_BACK, OWN_ID, HALT),
)


@dataclass(frozen=True)
class Fault:
    """A fault that begins at `at` and lasts `seconds`. `target` is a harvester, or a number of shards."""

    kind: str
    at: float
    seconds: float
    target: int


@dataclass(frozen=True)
class Plan:
    """A schedule's size, its faults, and how often something happens to a request on its way."""

    delivery: Delivery = "exactly-once"
    harvesters: int = 1
    shards: int = 1
    writers: int = 2
    transactions: int = 6  # Of each writer.
    writing: float = 6.0  # Seconds.
    keys: int = 3
    mishap_rate: float = 0.0
    mishaps: tuple[str, ...] = MISHAPS
    aims: tuple[str, ...] = ()
    latency: float = 0.002
    kafka_latency: float | None = None  # If it differs from `latency`.
    longest_pause: float = 10.0
    bad_rows: BadRows = "park"
    wakes: bool = False
    releases: bool = True
    create_times: CreateTimes = "now"
    large: float = 0.0  # How many of the events are so large that a read leaves their values out at first.
    faults: tuple[Fault, ...] = ()
    shares_election: bool = False  # With goharvest, in at-least-once delivery.
    slow_marks: float = 0.0  # How many of the marks take long, in at-least-once delivery.

    @classmethod
    def draw(cls, seed: int) -> Plan:
        """The plan of a seed. It has few kinds of faults, so that one kind does not hide the effects of another."""
        rng = random.Random(seed)
        writing = rng.uniform(2.0, 8.0)
        kinds = rng.sample(EVERYTHING, rng.randint(0, 2))
        kinds += rng.choice(THEMES) if rng.random() < 0.5 else rng.choices(_OF_ONE, k=rng.randint(0, 2))
        create_times: CreateTimes = rng.choice(("now", "now", "by the second", "the same"))
        harvesters = rng.choice((2, 2, 2, 3, 3, 4, 5))
        longest_pause = rng.choice((5.0, 10.0, 10.0, 60.0))
        return cls(
            delivery=rng.choice(("exactly-once", "exactly-once", "at-least-once")),
            harvesters=harvesters,
            shards=rng.choice((1, 1, 1, 2, 3)),
            writers=rng.randint(1, 4),
            transactions=rng.randint(2, 6),
            writing=writing,
            keys=rng.randint(1, 4),
            mishap_rate=(rate := rng.choice((0.0, 0.0, 0.01, 0.03, 0.1, 0.2, 0.3))),
            mishaps=tuple(rng.sample(MISHAPS, rng.randint(1, 4))),
            aims=tuple(rng.sample(AIMS, rng.randint(3, 6))) if rate > 0.1 else (),
            latency=rng.choice((0.002, 0.002, 0.02, 0.1)),
            longest_pause=longest_pause,
            bad_rows=rng.choice(("park", "park", "dead-letter")),
            wakes=rng.random() < 0.7,
            releases=rng.random() < 0.7,
            create_times="now" if set(kinds) & set(GIVES_IDS_AGAIN) else create_times,
            large=rng.choice((0.0, 0.0, 0.3)),
            faults=tuple(
                sorted(
                    (
                        Fault(
                            kind,
                            rng.uniform(0.2, writing),
                            rng.random() ** 2 * (longest_pause if kind == PAUSE else 10.0),
                            rng.randrange(harvesters) if kind in _OF_ONE else rng.randint(1, 3),
                        )
                        for kind in kinds
                        for _ in range(rng.choice((1, 1, 2)))
                    ),
                    key=lambda fault: fault.at,
                )
            ),
            shares_election=rng.random() < 0.2,
            slow_marks=rng.choice((0.0, 0.0, 0.1, 0.3)),
        )
