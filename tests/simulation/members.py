"""Consumers that share topics, in virtual time: the product's own `Member`, `World` and `FetchBuffer`; simulated Kafka.

A seed draws a plan: how many processes and partitions, which guarantee, and what befalls them.

- Requests take their time and keep each process's order. A broker that is away takes none. A request that is older than
  five seconds then is lost, unless it arrives late all the same. Some are sent again, though they had arrived. Or the
  log alone is away: processes still fetch, and ask how topics look.
- A process is killed and started again under its client id, or stopped as a whole (with what it has sent), or its
  machine is suspended, where its clock stands still, too. A handler takes long, or holds the interpreter. Some of that
  lasts longer than a new process reads back. Afterwards, the log may be back later than the other connections are.
- Each process has clocks of its own. The broker's clock jumps, as when another broker leads.
- Topics are deleted and recreated, some with many records at once, and widened. Processes ask how the topic looks now,
  and the answer takes its time. Some of the brokers are behind for a while: they answer with the former topic. The
  coordination topic is deleted and recreated: each process notices it after a while, writes to the new one until then,
  and is started again.
- A partition loses its end, and others write to it. Whoever reads it notices that.
- An operator with a wrong clock pauses and resumes the group. Somebody writes messages in another's name.

At each step: two processes never both hold a partition for certain (but for a while after the broker's clock has jumped
ahead, and but for one whose machine was suspended); at most once, no record is handed out twice; while the group is
paused and all have heard it, none is. At the end, when all is well: every record was handed out (at least once), and
all partitions were consumed to their ends. Where an end was lost below the group's position, this is so if somebody
noticed it, and held the partition until the log had it. While all is well for long, no partition with records stands
still for more than three heartbeats, unless its holder hands out records of other partitions meanwhile.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from outbox_plugin.coordination.actions import KeepPosition, Send
from outbox_plugin.coordination.claims import Claim
from outbox_plugin.coordination.events import ClaimEvent, ClaimLost
from outbox_plugin.coordination.fetch_buffer import FetchBuffer
from outbox_plugin.coordination.group_view import GroupView, TopicForm
from outbox_plugin.coordination.heartbeat_timing import HeartbeatTiming
from outbox_plugin.coordination.member import Member
from outbox_plugin.coordination.messages import (
    LARGEST,
    VERSION,
    Entry,
    Heartbeat,
    Message,
    ReleaseGroup,
    ReleasingPartition,
)
from outbox_plugin.coordination.partition_owners import (
    LONGEST_DOUBT,
    STALE_INTERVALS,
    TOPIC_CLIENT,
    Holder,
    Key,
    World,
    topic_ids_of,
)
from outbox_plugin.core.topic_partition import TopicPartition

INTERVAL = 2.0
TIMING = HeartbeatTiming(INTERVAL)
GROUP, TOPIC = "billing", "orders"
TURN = 0.25
TROUBLE_SECONDS, CALM_SECONDS = 60.0, 40.0
STILL_SECONDS = 3 * INTERVAL
EPOCH = 1_700_000_000.0
FOREVER = float("inf")
BATCH = 5
FAULTS = (
    *("kill", "stop", "hold", "away", "anew", "widen", "pause", "slow", "end"),
    *("suspend", "jump ahead", "jump back", "double", "late", "log anew", "long", "imitate", "cut"),
    "log away",
)
LASTING = ("stop", "hold", "kill", "anew")  # They may last longer than a new process reads back.
BROKERS = 3
MANY, MANY_SECONDS = 80, 20.0  # So many records, and until they are consumed.


@dataclass(frozen=True)
class Plan:
    """What is simulated, and what befalls it: (when, fault, process, for how long)."""

    at_most_once: bool
    processes: int
    partitions: int
    records: int
    faults: tuple[tuple[float, str, int, float], ...]

    @classmethod
    def draw(cls, seed: int) -> Plan:
        dice = random.Random(seed)
        processes = dice.randint(1, 4)
        kinds = dice.sample(FAULTS, dice.randint(1, 4))
        at_most_once = dice.random() < 0.5
        if at_most_once:  # What is promised at most once ends where a topic is deleted under its consumers.
            kinds = [kind for kind in kinds if kind != "anew"] or ["kill"]
        faults = []
        for _ in range(dice.randint(0, 12)):
            when, kind, process = dice.uniform(1, TROUBLE_SECONDS - 15), dice.choice(kinds), dice.randrange(processes)
            lasts = kind in LASTING and dice.random() < 0.05
            faults.append((when, kind, process, dice.uniform(35, 60) if lasts else dice.uniform(0.2, 12)))
        if not at_most_once and dice.random() < 0.2:
            faults += cls._while_one_is_away(dice, processes)
        return cls(at_most_once, processes, dice.randint(1, 6), dice.randint(20, 150), tuple(sorted(faults)))

    @staticmethod
    def _while_one_is_away(dice: random.Random, processes: int) -> list[tuple[float, str, int, float]]:
        """The topic is recreated while one process stands still, and the coordination topic or another process goes."""
        one, begins = dice.randrange(processes), dice.uniform(15, 25)
        seconds = dice.uniform(8, 12) if dice.random() < 0.7 else dice.uniform(35, 60)
        ends = begins + seconds
        faults = [(begins, dice.choice(["hold", "stop"]), one, seconds), (begins + 0.2, "anew", 0, dice.uniform(0, 9))]
        others = [number for number in range(processes) if number != one]
        if dice.random() < 0.7:
            faults += [(begins - 1.5, "slow", 0, 1.6), (ends - dice.uniform(0, 2), "log anew", 0, 1.0)]
            faults += [(ends - 1.5, "kill", number, 5.0) for number in others]
        else:
            faults += [(ends - dice.uniform(2, 9), "kill", number, 1.0) for number in others[:1]]
        return faults


@dataclass
class Topic:
    """The consumed topic: the leader epoch of each record of each partition, and which incarnation it is."""

    records: list[list[int]]
    number: int = 1
    cuts: list[list[int]] = field(default_factory=list)  # Where the end of each partition was after it was cut.

    def __post_init__(self) -> None:
        self.cuts = [[] for _ in self.records]

    @property
    def form(self) -> TopicForm:
        return TopicForm(len(self.records), f"id-{self.number}")

    def widen(self) -> None:
        self.records.append([])
        self.cuts.append([])


class Read(NamedTuple):
    """A record of the topic's incarnation of that number."""

    number: int
    topic_partition: TopicPartition
    offset: int
    epoch: int


class Record(NamedTuple):
    """What tells a record from all others."""

    number: int
    partition: int
    offset: int
    epoch: int


@dataclass
class Cut:
    """A partition was cut below the group's position."""

    end: int
    position: int
    epoch: int  # Of the first leader after it.
    noticed_by: Process | None = None  # It holds the partition, and is to tell the log.


@dataclass
class Process:
    """One client's present run."""

    client: str
    clock: float  # What its monotonic clock is ahead of the simulation's.
    member: Member | None = None
    runs: int = 0
    read: int = 0
    busy_at: float = 0.0  # It has handed out a record.
    busy_until: float = 0.0  # The user's handler runs.
    held_until: float = 0.0  # The interpreter is held.
    stopped_until: float = 0.0
    dead_until: float = 0.0
    fetched: FetchBuffer[Read] = field(default_factory=FetchBuffer)
    assigned: dict[TopicPartition, Claim] = field(default_factory=dict)
    fetch_at: dict[TopicPartition, int] = field(default_factory=dict)
    cuts_seen: dict[TopicPartition, int] = field(default_factory=dict)
    handling: Read | None = None
    promised: dict[TopicPartition, tuple[Claim, int]] | None = None
    promised_by: float = 0.0
    granted: list[KeepPosition] | None = None  # They are being kept: the answer to that comes at `kept_at`.
    kept_at: float = 0.0
    queue: list[Message] = field(default_factory=list)
    last_arrival: float = 0.0
    keeping: list[KeepPosition] = field(default_factory=list)  # Written to the state topic in this order.
    described: float = -1.0  # When it last asked how the topic looks.
    asked: float = 0.0  # The same by its own clock.
    form: TopicForm | None = None  # The answer, which is there at `form_at`.
    form_at: float = 0.0
    leaving: bool = False
    suspended_until: float = 0.0
    doubtful_until: float = 0.0  # Its clock stood still while it was suspended, so it may take itself for a holder.
    notices_at: float = FOREVER  # When it notices that the coordination topic was recreated.
    followed: float = 0.0  # When it last ran.
    log_back_at: float = 0.0  # After a stall, the log may be back later than the other connections.


class Simulation:
    """One schedule."""

    def __init__(self, seed: int, plan: Plan, *, tell: bool = False) -> None:
        self.plan = plan
        self.dice = random.Random(f"{seed}/run")
        self.now = 0.0
        self.trace: list[str] = []
        self._tell = tell
        self.broken: list[str] = []
        self.log: list[Entry] = []
        self.kept: dict[TopicPartition, tuple[float, int, tuple[str, ...]]] = {}
        self.pause: ReleaseGroup | None = None
        self.log_begins, self.log_since = 0, 0.0  # The first entry of the present coordination topic, and its time.
        self.broker_ahead = self.jumped_until = 0.0
        self.paused_from = self.away_until = self.troubled_until = self.slow_until = 0.0
        self.double_until = self.late_until = self.long_until = self.log_away_until = 0.0
        self.paused = False
        self.topic = Topic([[] for _ in range(plan.partitions)])
        self.handed_out: Counter[Record] = Counter()
        self.done: set[Record] = set()
        self.named: dict[TopicPartition, set[str]] = {}  # The topics that the log or the state topic has named.
        self.latest: dict[TopicPartition, tuple[str, float]] = {}  # The one that the log has named last, and when.
        self.seen_until: dict[str, float] = {}  # When the last broker named a former topic.
        self.cuts: dict[int, Cut] = {}  # Those of which the log does not know, by partition.
        self.world = World(INTERVAL, since=-FOREVER)  # By the whole log.
        self.progress: dict[int, float] = {}
        self.processes = [Process(f"client-{n}", self.dice.uniform(0, 10_000)) for n in range(plan.processes)]
        # Until when each broker is behind, and how it sees the topic until then.
        self.behind = [(0.0, self.topic.form)] * BROKERS
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def at(self, when: float, work: Callable[[], None]) -> None:
        self._sequence += 1
        heappush(self._timers, (when, self._sequence, work))

    def say(self, text: str) -> None:
        if self._tell:
            self.trace.append(f"{self.now:8.2f} {text}")

    def run(self) -> None:
        for process in self.processes:
            self.at(self.dice.uniform(0, 3), lambda process=process: self._turn(process))  # type: ignore[misc]
        for when, kind, number, seconds in self.plan.faults:
            self.at(when, lambda k=kind, n=number, s=seconds: self._befall(k, self.processes[n], s))  # type: ignore[misc]
        for _ in range(self.plan.records):
            self.at(self.dice.uniform(0, TROUBLE_SECONDS), self._write)
        self.at(1.0, self._check_progress)
        while self._timers and not self.broken and self._timers[0][0] < self._ends_at:
            self.now, _, work = heappop(self._timers)
            work()
        if not self.broken:
            self._check_end()

    @property
    def _ends_at(self) -> float:
        return max(TROUBLE_SECONDS, self.troubled_until) + CALM_SECONDS

    # Kafka.

    @property
    def broker_time(self) -> float:
        return EPOCH + self.now + self.broker_ahead

    def _write(self) -> None:
        partition = self.dice.randrange(len(self.topic.records))
        if not self._waits(partition):
            self.progress[partition] = self.now
        self.topic.records[partition].append(len(self.topic.cuts[partition]))

    def _waits(self, partition: int) -> bool:
        """Whether the partition has records for somebody; at most once, not those promised to one who died."""
        if self.plan.at_most_once:
            return not self._is_read(partition, len(self.topic.records[partition]))
        return any(record not in self.handed_out for record in self._owed(partition))

    def _owed(self, partition: int) -> list[Record]:
        """The records that the group is to get, at least once."""
        cut = self.cuts.get(partition)
        return [
            Record(self.topic.number, partition, offset, epoch)
            for offset, epoch in enumerate(self.topic.records[partition])
            if cut is None or cut.noticed_by is not None or offset >= cut.position or epoch < cut.epoch
        ]

    def _send(self, process: Process, message: Message) -> None:
        """In the process's order; it arrives later, or never when the broker is away for too long."""
        process.queue.append(message)
        late = self.dice.choice([0.01, 0.05, 0.3 if self.dice.random() < 0.9 else 1.5])
        if self.now < self.slow_until:
            late = self.dice.uniform(0.5, 4.0)
        process.last_arrival = max(process.last_arrival, self.now + late)
        sent, run = self.now, process.runs
        self.at(process.last_arrival, lambda: self._arrive(process, message, sent, run))

    def _arrive(self, process: Process, message: Message, sent: float, run: int) -> None:
        if process.runs != run or self.now < process.dead_until or message not in process.queue:
            return
        until = max(self.away_until, self.log_away_until, process.stopped_until)
        if self.now < until:
            process.last_arrival = max(process.last_arrival, until + 0.01)
            self.at(process.last_arrival, lambda: self._arrive(process, message, sent, run))
            return
        process.queue.remove(message)
        if self.now - sent < 5 + max(0.0, process.stopped_until - sent) or self.now < self.late_until:
            self.append(message)
            if self.now < self.double_until and self.dice.random() < 0.3:
                self.append(message)  # No later: producers keep their order.
        else:
            self.say(f"lost: {message}")

    def append(self, message: Message) -> None:
        self.say(f"log {len(self.log)}: {message}")
        self.log.append(Entry(0, len(self.log), self.broker_time, message))
        counted = self.world.apply(message, self.broker_time)
        if counted and message.client_id == TOPIC_CLIENT:
            self._check_topic(TopicPartition(TOPIC, message.partition), *topic_ids_of(message.instance_id))
        if counted and isinstance(message, ReleasingPartition) and message.partition in self.cuts:
            self._set_back(message.partition, message.offset)

    def _set_back(self, partition: int, offset: int) -> None:
        """The log knows of a cut once the group is set back by one who has noticed it: else that may not last."""
        cut = self.cuts[partition]
        if offset <= cut.end and cut.noticed_by is not None:
            del self.cuts[partition]

    def _keep_first(self, process: Process) -> None:
        if process.keeping:
            self._keep(process.keeping.pop(0))

    def _keep(self, keep: KeepPosition) -> None:
        """A late record does not hide one that the log said later."""
        at, offset, topic_ids = keep.at, keep.offset, keep.topic_ids
        known = self.kept.get(keep.topic_partition)
        if known is None or known[0] <= at:
            self.kept[keep.topic_partition] = (at, offset, topic_ids)

    # Processes.

    def _start(self, process: Process) -> None:
        now = self.now + process.clock
        process.runs += 1
        process.fetched, process.assigned, process.fetch_at = FetchBuffer(), {}, {}
        process.handling = process.promised = process.granted = None
        process.queue, process.described, process.form = [], self.now, None
        process.busy_until = process.held_until = 0.0
        process.notices_at, process.followed, process.log_back_at = FOREVER, self.now, self.now
        since = max(self.broker_time - TIMING.lookback, self.log_since)
        process.member = member = Member(
            Holder(f"run-{process.client}-{process.runs}", process.client),
            GroupView(GROUP, [TOPIC], INTERVAL, width=1, since=since, log_ahead=self.broker_time - now),
            TIMING,
            now=now,
            at_most_once=self.plan.at_most_once,
            limit=None,
        )
        if self.pause is not None:
            member.view.worlds[0].remember_pause(self.pause)
        for tp, (at, offset, topic_ids) in self.kept.items():
            member.view.remember(Key(GROUP, *tp), offset, topic_ids, at)
        entries = self.log[self.log_begins :]
        first = next((number for number, entry in enumerate(entries) if entry.at >= since), len(entries))
        for entry in entries[first:]:
            member.apply(entry, now, live=False)
        member.view.caught_up()
        process.read = len(self.log)
        member.describe({TOPIC: self._form_by_some_broker()}, now)
        member.resume(now)
        self._carry_out(process)

    def _turn(self, process: Process) -> None:
        """What the coordination thread and the user's thread do, in this order or the other."""
        self.at(self.now + self.dice.uniform(0.5, 1.0) * TURN, lambda: self._turn(process))
        if self.now < max(process.dead_until, process.stopped_until, process.held_until, process.suspended_until):
            return
        if self.now >= process.notices_at:
            self._kill(process, self.now + self.dice.uniform(0.1, 1.0))
            return
        if process.member is None:
            if self.now >= max(self.away_until, self.log_away_until):
                self._start(process)
            return
        first, second = self.dice.sample([self._follow, self._use], 2)
        first(process)
        second(process)

    def _follow(self, process: Process) -> None:
        member, now = process.member, self.now + process.clock
        assert member is not None
        if self.now - process.followed > STALE_INTERVALS * INTERVAL:
            process.log_back_at = self.now + self.dice.choice([0.0, self.dice.uniform(0, 3)])
        process.followed = self.now
        if self.now >= max(self.away_until, self.log_away_until, process.log_back_at) and process.notices_at == FOREVER:
            # A held interpreter, or a slow thread, reads only a part.
            upto = len(self.log) if self.dice.random() < 0.8 else self.dice.randint(process.read, len(self.log))
            for entry in self.log[process.read : upto]:
                member.apply(entry, now)
            process.read = upto
        if self.now >= self.away_until and process.notices_at == FOREVER:
            self._describe(process, member, now)
        member.tick(now)
        self._carry_out(process)
        self._check_holders()

    def _describe(self, process: Process, member: Member, now: float) -> None:
        """Ask how the topic looks, or take in the answer to that, which is as old as it is late."""
        if process.form is not None and self.now >= process.form_at:
            member.describe({TOPIC: process.form}, now, asked=process.asked)
            process.form = None
        elif process.form is None and self.now - process.described > INTERVAL / 2:
            process.described, process.asked, process.form = self.now, now, self._form_by_some_broker()
            process.form_at = self.now + self.dice.choice([0.01, 0.3, 1.5 if self.now < self.slow_until else 0.05])

    def _form_by_some_broker(self) -> TopicForm:
        until, form = self.dice.choice(self.behind)
        return form if self.now < until else self.topic.form

    def _carry_out(self, process: Process) -> None:
        assert process.member is not None
        for action in process.member.take():
            if isinstance(action, Send):
                self._send(process, action.message)
            elif isinstance(action, KeepPosition):
                process.keeping.append(action)
                self.at(self.now + self.dice.uniform(0, 1), lambda: self._keep_first(process))
            else:
                self._note(process, action)

    def _note(self, process: Process, event: ClaimEvent) -> None:
        if isinstance(event, ClaimLost) and event.why != "its log was truncated":
            self._forget_cuts(process, event.topic_partition.partition)
        self.say(f"{process.client}: {event}")

    def _use(self, process: Process) -> None:
        """Finish the record in hand, commit it, and poll for the next ones."""
        member, now = process.member, self.now + process.clock
        assert member is not None
        if self.now < process.busy_until or process.leaving:
            return
        if process.handling is not None:
            self._finish(process, member)
        self._follow_claims(process, member, now)
        if process.promised is not None and not self._promise(process, member):
            return
        if self._hand_out(process, member):
            return
        self._fetch(process)
        if self.plan.at_most_once and process.fetched and process.promised is None:
            ends = process.fetched.ends()
            if any(end > claim.promised for claim, end in ends.values()):
                process.promised, process.promised_by = ends, self.now + 5
                member.ask_for_messages({tp: end for tp, (_, end) in ends.items()}, now)
                self._carry_out(process)
                return
        self._hand_out(process, member)

    def _hand_out(self, process: Process, member: Member) -> bool:
        """Handle what may be handed out, and commit it. Returns True if a record is left in hand."""
        now = self.now + process.clock
        while (read := process.fetched.next(lambda p, c, o: member.may_hand_out(p, c, o, now))) is not None:
            process.handling = read
            self._handed_out(process, read)
            if self.dice.random() < 0.5:
                is_long = self.now < self.long_until and self.dice.random() < 0.3
                seconds = self.dice.uniform(3, 9) if is_long else self.dice.choice([0.01, 0.05, 0.2])
                process.busy_until = self.now + seconds
                return True
            self._finish(process, member)
        return False

    def _finish(self, process: Process, member: Member) -> None:
        assert process.handling is not None
        number, tp, offset, epoch = process.handling
        self.done.add(Record(number, tp.partition, offset, epoch))
        member.done(tp, offset)
        process.handling = None

    def _handed_out(self, process: Process, read: Read) -> None:
        tp = read.topic_partition
        record = Record(read.number, tp.partition, read.offset, read.epoch)
        self.say(f"{process.client} hands out {record}")
        self.handed_out[record] += 1
        self.progress[tp.partition] = process.busy_at = self.now
        if self.plan.at_most_once and self.handed_out[record] > 1:
            self.broken.append(f"{record} was handed out twice, at {self.now:.2f}")
        if self.paused and self.now > max(self.paused_from + 2 * INTERVAL + 1, process.doubtful_until):
            self.broken.append(f"{record} was handed out while the group was paused, at {self.now:.2f}")

    def _follow_claims(self, process: Process, member: Member, now: float) -> None:
        member.polled(now)
        held = member.claims()
        for tp in [tp for tp, claim in process.assigned.items() if held.get(tp) is not claim]:
            del process.assigned[tp]
            process.fetched.forget(tp)
        for tp, claim in held.items():
            if tp not in process.assigned:
                process.assigned[tp] = claim
                process.fetch_at[tp] = claim.position
                process.cuts_seen[tp] = len(self._cuts(tp))

    def _fetch(self, process: Process) -> None:
        if self.now < self.away_until or len(process.fetched) > BATCH:
            return
        for tp, claim in process.assigned.items():
            records = self.topic.records[tp.partition] if tp.partition < len(self.topic.records) else []
            if self._goes_back(process, tp, claim, len(records)):
                continue
            first = process.fetch_at[tp]
            for offset, epoch in enumerate(records[first : first + BATCH], first):
                process.fetched.add(tp, claim, offset, Read(self.topic.number, tp, offset, epoch))
                process.fetch_at[tp] = offset + 1

    def _cuts(self, tp: TopicPartition) -> list[int]:
        return self.topic.cuts[tp.partition] if tp.partition < len(self.topic.cuts) else []

    def _goes_back(self, process: Process, tp: TopicPartition, claim: Claim, end: int) -> bool:
        """Notice that the partition was cut while it was read, or recreated. Returns True if the group is to go back.

        A partition that ends before the position is fetched from its first record, and consumed so at least once.
        """
        ends = self._cuts(tp)[process.cuts_seen[tp] :]
        process.cuts_seen[tp] = len(self._cuts(tp))
        at = min([*ends, process.fetch_at[tp]])
        if process.fetch_at[tp] > end and not ends:
            at = process.fetch_at[tp] = 0
        if at < process.fetch_at[tp]:
            process.fetch_at[tp] = at
            process.fetched.truncate(tp, at)
        if at >= claim.position or at >= end or (self.plan.at_most_once and not ends):
            return False
        assert process.member is not None
        self.say(f"{process.client} goes back to {at} of {tp}")
        if (cut := self.cuts.get(tp.partition)) is not None and at <= cut.end:
            cut.noticed_by = process
        process.member.go_back(tp, claim, at, self.now + process.clock)
        self._carry_out(process)
        return True

    def _promise(self, process: Process, member: Member) -> bool:
        """As `Instance.promise` does it; whether the user may go on."""
        assert process.promised is not None
        if process.granted is None:
            verdicts = member.verdicts({tp: end for tp, (_, end) in process.promised.items()})
            if None in verdicts.values() and self.now < process.promised_by:
                return False
            while process.keeping:
                self._keep_first(process)
            process.granted = member.granted(process.promised, self.now + process.clock)
            for each in process.granted:
                self._keep(each)
            is_slow = self.now < self.slow_until or self.dice.random() < 0.2
            process.kept_at = self.now + (self.dice.uniform(0, 3) if is_slow else 0.0)
        if self.now < process.kept_at:
            return False
        member.promise(process.promised, process.granted)
        process.promised = process.granted = None
        return True

    # What befalls them.

    def _befall(self, kind: str, process: Process, seconds: float) -> None:
        self.say(f"{kind} {process.client} for {seconds:.1f} s")
        until = self.now + seconds
        match kind:
            case "kill":
                self._kill(process, until)
            case "end":
                self._end(process, until)
            case "stop":
                process.stopped_until = max(process.stopped_until, until)
            case "hold":
                process.held_until = max(process.held_until, until)
            case "away":
                self.away_until = max(self.away_until, min(until, self.now + 6))
            case "log away":
                self.log_away_until = max(self.log_away_until, min(until, self.now + 6))
            case "slow":
                self.slow_until = max(self.slow_until, until)
            case "suspend":
                self._suspend(process, seconds)
            case "jump ahead":
                self.broker_ahead += seconds
                self.jumped_until = self.now + 3 * INTERVAL  # Until each holder has read that others hold what it held.
            case "jump back":
                self.broker_ahead -= seconds
                # One who died looks fresh for so much longer; so does whoever may hold what a lost log had said.
                until = max(until, self.troubled_until) + seconds
            case "double":
                self.double_until = max(self.double_until, until)
            case "late":
                self.late_until = max(self.late_until, until)
            case "imitate":
                self._imitate(process, until)
            case "long":
                self.long_until = max(self.long_until, until)
                until += 9
            case "log anew":
                until = self._recreate_log()
            case "anew":
                for broker in range(BROKERS):
                    if self.dice.random() < 0.5 and self.behind[broker][0] <= self.now:
                        self.behind[broker] = (self.dice.uniform(self.now, self.now + seconds), self.topic.form)
                self.seen_until[self.topic.form.topic_id] = self.now
                self.seen_until |= {form.topic_id: self._seen_until(form.topic_id) for _, form in self.behind}
                records = [[0] * self.dice.randint(0, 12) for _ in self.topic.records]
                if self.dice.random() < 0.5:  # A position of the former topic is none beyond the end of this one.
                    self.dice.choice(records).extend([0] * MANY)
                    until += MANY_SECONDS
                self.topic = Topic(records, self.topic.number + 1)
                self.cuts.clear()
                self.progress = dict.fromkeys(range(len(self.topic.records)), self.now)
            case "widen":
                self.topic.widen()
            case "cut":
                self._cut(self.dice.randrange(len(self.topic.records)))
            case _:
                self._pause(seconds)
        self.troubled_until = max(self.troubled_until, until)

    def _seen_until(self, topic_id: str) -> float:
        """When the last broker names a topic that was deleted."""
        by_some = [until for until, form in self.behind if form.topic_id == topic_id]
        return max([self.seen_until.get(topic_id, 0.0), *by_some])

    def _cut(self, partition: int) -> None:
        """Its end is lost, and its new leader has other records."""
        records = self.topic.records[partition]
        del records[max(0, len(records) - self.dice.randint(1, 6)) :]
        end, tp = len(records), TopicPartition(TOPIC, partition)
        self.topic.cuts[partition].append(end)
        records.extend([len(self.topic.cuts[partition])] * self.dice.randint(1, 8))
        positions = [self.world.offset(GROUP, *tp) or 0, self.kept.get(tp, (0.0, 0, ()))[1]]
        position = max(*positions, *(each.fetch_at.get(tp, 0) for each in self.processes))
        epoch = len(self.topic.cuts[partition])
        if (former := self.cuts.pop(partition, None)) is not None:
            end, position, epoch = min(end, former.end), max(position, former.position), former.epoch
        if position > end:
            self.cuts[partition] = Cut(end, position, epoch)
        self.progress[partition] = self.now

    def _forget_cuts(self, process: Process, partition: int | None = None) -> None:
        """One who noticed that a partition was cut could not tell the log before it lost it."""
        for each, cut in self.cuts.items():
            if cut.noticed_by is process and partition in (None, each):
                cut.noticed_by = None

    def _kill(self, process: Process, until: float) -> None:
        self._forget_cuts(process)
        process.member, process.leaving, process.dead_until = None, False, until
        process.notices_at = FOREVER
        process.runs += 1

    def _suspend(self, process: Process, seconds: float) -> None:
        """The machine sleeps, and with it the process's monotonic clock."""
        if self.now < max(process.suspended_until, process.stopped_until):
            return
        process.clock -= seconds
        process.suspended_until = process.stopped_until = self.now + seconds
        process.doubtful_until = process.suspended_until + 2 * TURN + 2 * INTERVAL

    def _imitate(self, process: Process, until: float) -> None:
        """Somebody else writes messages in a process's name, now and then, with times in the past or the future."""
        if process.member is not None:
            for tp in process.assigned:
                sent = int(self.broker_time) + self.dice.choice([-100, 1_000])
                self.append(Heartbeat(VERSION, sent, *process.member.me, GROUP, *tp, 0))
        if (next_at := self.now + self.dice.uniform(0.2, 2.0)) < until:
            self.at(next_at, lambda: self._imitate(process, until))

    def _recreate_log(self) -> float:
        """Delete the coordination topic, and make one of its name. Returns when all have noticed, and go on."""
        self.log_begins, self.log_since = len(self.log), self.broker_time
        self.world = World(INTERVAL, since=self.log_since)
        self.named = {tp: {*topic_ids} for tp, (_, _, topic_ids) in self.kept.items()}
        self.latest.clear()
        for partition, cuts in enumerate(self.topic.cuts):
            if cuts:  # The lost log may have known of it, and what is kept beside it not yet.
                self.cuts[partition] = Cut(-1, LARGEST, 1)
        until = self.now
        for process in self.processes:
            if process.member is not None and not process.leaving:
                runs_at = max(self.now, process.stopped_until, process.held_until)
                process.notices_at = min(process.notices_at, runs_at + self.dice.uniform(0, INTERVAL))
                until = max(until, process.notices_at)
        return until + 2 + LONGEST_DOUBT * STALE_INTERVALS * INTERVAL  # Until then nobody may know who holds what.

    def _end(self, process: Process, until: float) -> None:
        """Cleanly, or to be started again soon; the log gets what is said at the end, or its first part."""
        if process.member is None or process.leaving or self.now < max(process.stopped_until, process.held_until):
            return
        process.leaving = True
        process.member.leave(self.now + process.clock, keep=self.dice.random() < 0.3)
        self._carry_out(process)

        self.at(self.now + 1.0, lambda: self._kill(process, until))

    def _pause(self, seconds: float) -> None:
        """By an operator whose clock is wrong; kept for those who come later, as the log has it."""
        if self.paused:
            return
        ahead = self.dice.choice([-3_600, -2.6, 0, 2.6, 12, 3_600])
        sent = int(self.broker_time + ahead)
        self.append(ReleaseGroup(VERSION, sent, "run-operator", "operator", GROUP, "", 0, sent + 3_600))
        self.pause = ReleaseGroup(
            VERSION, int(self.broker_time), "run-operator", "operator", GROUP, "", 0, int(self.broker_time) + 3_600
        )
        self.paused, self.paused_from = True, max(self.now, self.away_until, self.slow_until)

        def resume() -> None:
            self.paused = False
            self.append(ReleaseGroup(VERSION, sent + 1, "run-operator", "operator", GROUP, "", 0, 0))
            self.pause = None
            self.troubled_until = max(self.troubled_until, self.now)

        self.at(self.now + seconds + 4 * INTERVAL, resume)
        self.troubled_until = max(self.troubled_until, self.now + seconds + 4 * INTERVAL)

    # What must not be.

    def _check_holders(self) -> None:
        holders: Counter[TopicPartition] = Counter()
        for process in self.processes:
            if process.member is not None and self.now >= max(process.dead_until, process.doubtful_until):
                holders.update(list(process.member.held(self.now + process.clock)))
        for tp, count in holders.items():
            if count > 1 and self.now >= self.jumped_until:
                self.broken.append(f"{count} hold {tp} at {self.now:.2f}")

    def _check_topic(self, tp: TopicPartition, topic_id: str, *before: str) -> None:
        """The log never goes back to a topic that it has named, or that no broker has named since the latest one."""
        named = self.named.setdefault(tp, set())
        latest, at = self.latest.get(tp, (topic_id, 0.0))
        if tp not in self.latest and number_of(topic_id) < max(map(number_of, before), default=0):
            self.broken.append(f"{tp} begins with {topic_id}, a former topic, at {self.now:.2f}")
        if number_of(topic_id) < number_of(latest):
            if topic_id in named or self.seen_until.get(topic_id, 0.0) < at:
                self.broken.append(f"{tp} is set back from {latest} to {topic_id} at {self.now:.2f}")
            # It never heard of the earlier one, and takes it for the later one until brokers have denied it for long.
            self.troubled_until = max(self.troubled_until, self.now + 2 * TIMING.lookback)
        self.latest[tp] = (topic_id, self.now)
        named.update((topic_id, *before))

    def _check_progress(self) -> None:
        self.at(self.now + 1.0, self._check_progress)
        calm_since = max(self.troubled_until, self.away_until, self.slow_until)
        calm_since = max([calm_since, *(each.dead_until for each in self.processes)])
        for partition in range(len(self.topic.records)):
            stands_since = max(self.progress.get(partition, 0.0), calm_since + 2 * INTERVAL, self._busy_at(partition))
            if self.now - stands_since > STILL_SECONDS and self._waits(partition):
                self.broken.append(f"partition {partition} stands still at {self.now:.2f}")

    def _busy_at(self, partition: int) -> float:
        """When the partition's holder last handed out a record of any partition: one process may have many to do."""
        tp = TopicPartition(TOPIC, partition)
        return max((each.busy_at for each in self.processes if each.member and tp in each.assigned), default=0.0)

    def _is_read(self, partition: int, end: int) -> bool:
        """Whether the log says that the group goes on there."""
        tp = TopicPartition(TOPIC, partition)
        return any(each.member is not None and each.member.offset_of(tp)[0] >= end for each in self.processes)

    def _check_end(self) -> None:
        for partition, records in enumerate(self.topic.records):
            if not self._is_read(partition, len(records)):
                self.broken.append(f"partition {partition} was not consumed to its end")
            if not self.plan.at_most_once:
                lost = [record.offset for record in self._owed(partition) if record not in self.done]
                if lost:
                    self.broken.append(f"lost: {lost} of partition {partition}")


def number_of(topic_id: str) -> int:
    """Which incarnation of the topic has that id."""
    return int(topic_id.removeprefix("id-"))


def run(seed: int, *, plan: Plan | None = None, tell: bool = False) -> Simulation:
    """Run the schedule of a seed, or of a plan and a seed."""
    simulation = Simulation(seed, plan or Plan.draw(seed), tell=tell)
    simulation.run()
    return simulation
