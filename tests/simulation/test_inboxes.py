"""Inboxes over a partition that is cut: schedules that are judged, and planted bugs that are found.

pytest tests/simulation/test_inboxes.py                        some schedules, and the planted bugs
pytest tests/simulation/test_inboxes.py --schedules 20000      a long run; `--first-seed` begins elsewhere
pytest tests/simulation/test_inboxes.py -s --seed 139          one schedule again, with a readable trace
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outbox_plugin.adapters.topic_ids import Answer
from outbox_plugin.inbox import assignments, consumer, leader_epochs, poll_loop, positions, rereader
from outbox_plugin.inbox.key_queues import KeyQueues
from outbox_plugin.inbox.leader_epochs import Finding, GroupPosition, LeaderEpochs
from tests.simulation import inboxes
from tests.simulation.conftest import Seeds
from tests.simulation.inboxes import run

SCHEDULES = 1_600
SOON = 1_500


@pytest.fixture(autouse=True)
def _simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule's clock tells how old a record is, and nothing waits."""
    present: list[inboxes.Simulation] = []
    begin = inboxes.Simulation.__init__

    def noted(simulation: inboxes.Simulation, *args: Any, **options: Any) -> None:
        present[:] = [simulation]
        begin(simulation, *args, **options)

    monkeypatch.setattr(inboxes.Simulation, "__init__", noted)
    clock = SimpleNamespace(time=lambda: present[0].now, monotonic=lambda: 0.0)
    for module in (assignments, consumer, poll_loop):
        monkeypatch.setattr(module, "time", clock)
    for module in (assignments, consumer):
        monkeypatch.setattr(module, "RELEASE_SECONDS", 0.0)
    monkeypatch.setattr(poll_loop, "QUEUED_SECONDS", 50.0)
    monkeypatch.setattr(rereader, "UNKNOWN_ID_SECONDS", 0.0)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_promises_hold_in_every_schedule(seeds: Seeds, tells: bool) -> None:
    for seed in seeds(SCHEDULES):
        simulation = run(seed, tell=tells)
        if tells:
            print(simulation.plan, *simulation.trace, sep="\n")
        assert not simulation.broken, (
            f"seed {seed}: {'; '.join(simulation.broken)}\n{simulation.plan}\n"
            f"replay it: pytest tests/simulation/test_inboxes.py -s --seed {seed}"
        )


def test_a_seed_is_a_schedule() -> None:
    traces = [run(seed, tell=True).trace for seed in (5, 5, 6)]
    assert traces[0] == traces[1] != traces[2]


Plant = Callable[[pytest.MonkeyPatch], None]


def forget_at_a_restart_what_was_handled_before_a_cut(patch: pytest.MonkeyPatch) -> None:
    written = positions._known
    patch.setattr(positions, "_known", lambda position: written(position._replace(handled=())))


def write_positions_without_epochs(patch: pytest.MonkeyPatch) -> None:
    read = positions._position
    patch.setattr(positions, "_position", lambda offset, known: read(offset, known)._replace(leader_epoch=None))


def pass_over_a_cut_under_a_running_inbox(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaderEpochs, "goes_back", lambda *_: False)


def keep_the_last_position_alone(patch: pytest.MonkeyPatch) -> None:
    also = GroupPosition.and_handled
    patch.setattr(
        GroupPosition,
        "and_handled",
        lambda position, other: also(position, other and other._replace(handled=())),
    )


def compare_no_epochs(patch: pytest.MonkeyPatch) -> None:
    def below(position: GroupPosition, offset: int, _: int | None) -> bool:
        return any(offset < each.next_offset for each in position.handled)

    patch.setattr(GroupPosition, "has_handled", below)


def stay_where_all_was_handled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyQueues, "leave_out", lambda *_: None)


def take_a_gap_for_no_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaderEpochs, "is_cut", lambda *_: False)


def handle_a_key_beside_its_handler_of_an_earlier_assignment(patch: pytest.MonkeyPatch) -> None:
    revoke = KeyQueues.revoke

    def revoke_and_forget(queues: KeyQueues, partitions: list[Any]) -> None:
        revoke(queues, partitions)
        queues._blocked.clear()

    patch.setattr(KeyQueues, "revoke", revoke_and_forget)


def take_what_was_compared_for_handled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        rereader.Rereader, "_position", lambda reading, tp: reading._epochs._compared.get(tp, GroupPosition(0))
    )


def remember_the_epoch_of_a_record_that_shows_a_cut(patch: pytest.MonkeyPatch) -> None:
    add = LeaderEpochs.add

    def add_twice(epochs: LeaderEpochs, *record: Any, **options: Any) -> Finding:
        if (finding := add(epochs, *record, **options)) is Finding.CUT:
            add(epochs, *record, **options)
        return finding

    patch.setattr(LeaderEpochs, "add", add_twice)


def take_the_record_behind_a_gap_for_the_one_that_is_compared(patch: pytest.MonkeyPatch) -> None:
    """Where the last record that was handled was compacted away since."""
    compare = leader_epochs.compare

    def compare_any(position: GroupPosition, offset: int, leader_epoch: int | None) -> Finding:
        found = compare(position, offset, leader_epoch)
        return Finding.HANDLED if found is Finding.NEW else found

    patch.setattr(leader_epochs, "compare", compare_any)


def go_on_in_a_recreated_topic_where_the_group_was_in_the_old_one(patch: pytest.MonkeyPatch) -> None:
    start = positions.start_position
    patch.setattr(
        positions,
        "start_position",
        lambda committed, metadata, topic_id, ours: start(committed, metadata and topic_id, topic_id, ours),
    )


def leave_out_records_of_a_recreated_topic_and_do_not_read_them_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rereader.Rereader, "restart", lambda *_: None)


PLANTS: list[tuple[Plant, str]] = [
    (forget_at_a_restart_what_was_handled_before_a_cut, "twice"),
    (write_positions_without_epochs, "before"),
    (pass_over_a_cut_under_a_running_inbox, "twice"),
    (keep_the_last_position_alone, "twice"),
    (compare_no_epochs, "before"),
    (stay_where_all_was_handled, "the group is at"),
    (take_a_gap_for_no_cut, "before"),
    (handle_a_key_beside_its_handler_of_an_earlier_assignment, "later"),
    (take_what_was_compared_for_handled, "before"),
    (remember_the_epoch_of_a_record_that_shows_a_cut, "twice"),
    (go_on_in_a_recreated_topic_where_the_group_was_in_the_old_one, "before"),
    (leave_out_records_of_a_recreated_topic_and_do_not_read_them_again, "no effect"),
    (take_the_record_behind_a_gap_for_the_one_that_is_compared, "no effect"),
]


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("plant", "found"), PLANTS, ids=[plant.__name__ for plant, _ in PLANTS])
def test_a_planted_bug_is_found(plant: Plant, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(SOON):
        if any(found in each for each in run(seed).broken):
            return
    raise AssertionError(f"not found in {SOON} schedules")


class Scripted(inboxes.Simulation):
    """A schedule that a test writes down: nothing fails by chance."""

    def __init__(self) -> None:
        super().__init__(0, inboxes.Plan(failures=0.0))
        self.append(10, age=3 * inboxes.KEEP_SECONDS)
        self._settle()

    def append(self, number: int, age: float = 0.0) -> None:
        """Append so many records, which are so many seconds old."""
        for _ in range(number):
            self._number += 1
            name = f"record {self._number}"
            stored = inboxes.Stored(name, self.log.epoch, self.now - age, self.log.topic_id)
            self.postgres.places[name], self.postgres.offsets[name] = stored, self.log.end
            self.log.records.append(stored)

    def cut(self, end: int) -> None:
        """Cut the log. No client notices it by itself."""
        del self.log.records[end:]
        self.log.epoch += 1

    def messages(self, first: int, behind: int) -> list[Any]:
        """Records as librdkafka returns them, which has fetched them by now."""
        assert self.owner is not None
        self.owner.client.at, self.owner.client.has_fetched = behind, True
        return [inboxes._message(offset, self.log.records[offset]) for offset in range(first, behind)]

    def add(self, messages: list[Any], *, id_is_returned: bool = True) -> None:
        """Have the inbox take in what it polled. Kafka may not return the topic's id then."""
        assert self.owner is not None
        ids, answer = self.owner.loop._topic_ids, self.owner.loop._topic_ids.look_up
        if not id_is_returned:
            ids.look_up = lambda _: Answer(recreated=set(), known=set())
        self.owner.loop.add(messages)
        ids.look_up = answer

    def handle_first(self) -> None:
        """Handle the first record that waits."""
        assert self.owner is not None
        [taken] = self.owner.queues.take(1, self.now)
        self.running.append(inboxes.Transaction(self.owner, taken))
        self._claim(self.running[-1])
        self._end(self.running[-1])

    def judged(self) -> list[str]:
        """What is broken at the end, when all is well."""
        self.append(1)
        self._settle()
        self._check_end()
        return self.broken


def test_a_cut_is_noticed_behind_records_that_are_fetched_again() -> None:
    """A seek has librdkafka forget the epoch that it has read."""
    simulation = Scripted()
    simulation.append(2)
    unnamed = simulation.messages(10, 12)
    for message in unnamed:
        message.headers = list
    simulation.add(unnamed, id_is_returned=False)
    simulation.cut(6)
    simulation.append(8)
    assert simulation.judged() == []


def test_a_cut_is_noticed_in_records_that_are_fetched_again() -> None:
    simulation = Scripted()
    simulation.append(3)
    before = simulation.messages(10, 13)
    simulation.cut(6)
    simulation.append(8)
    simulation.add(before + simulation.messages(0, 4), id_is_returned=False)
    assert simulation.judged() == []


def test_two_cuts_in_records_that_are_polled_at_once_are_told_apart() -> None:
    """The position that was reached before the first one says nothing of what came between them."""
    old = 3 * inboxes.KEEP_SECONDS
    simulation = Scripted()
    simulation.cut(5)
    simulation.append(4, age=old)
    first = simulation.messages(0, 6)
    simulation.cut(8)
    simulation.append(4)
    simulation.add(first + simulation.messages(0, 3))
    assert simulation.judged() == []


def test_a_cut_is_noticed_where_the_record_that_shows_it_is_fetched_again() -> None:
    """An inbox that starts compares the record before its position. Kafka does not return the topic's id then."""
    simulation = Scripted()
    simulation._kill()
    simulation.cut(6)
    simulation.append(8)
    simulation._start()
    unnamed = simulation.messages(9, 11)
    for message in unnamed:
        message.headers = list
    simulation.add(unnamed, id_is_returned=False)
    assert simulation.judged() == []


def test_a_cut_is_noticed_after_a_restart_though_records_were_fetched_again_while_earlier_ones_waited() -> None:
    """The position that is committed then has its epoch."""
    simulation = Scripted()
    simulation.append(6)
    simulation.add(simulation.messages(10, 14))
    unnamed = simulation.messages(14, 16)
    for message in unnamed:
        message.headers = list
    simulation.add(unnamed, id_is_returned=False)
    simulation.handle_first()
    simulation._tick()
    simulation._kill()
    simulation.cut(6)
    simulation.append(12)
    assert simulation.judged() == []


def test_a_recreated_topic_is_noticed_where_kafka_returns_its_id_only_when_the_record_comes_again() -> None:
    """Its records would count as those of the old topic, which are handled up to the position."""
    simulation = Scripted()
    assert simulation.owner is not None
    simulation._recreate()
    simulation.append(1, age=3 * inboxes.KEEP_SECONDS)
    simulation.add(simulation.messages(0, 1), id_is_returned=False)
    simulation.add(simulation.messages(0, 1))
    assert simulation.owner.topic_ids.of(inboxes.PARTITION.topic) == simulation.log.topic_id
    assert simulation.judged() == []
