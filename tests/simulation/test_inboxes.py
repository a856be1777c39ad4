"""Inboxes over partitions that are cut: schedules that are judged, and planted bugs that are found.

pytest tests/simulation/test_inboxes.py                        some schedules, and the planted bugs
pytest tests/simulation/test_inboxes.py --schedules 20000      a long run; `--first-seed` begins elsewhere
pytest tests/simulation/test_inboxes.py -s --seed 139          one schedule again, with a readable trace
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from outbox_plugin.adapters.topic_ids import Answer
from outbox_plugin.core import leader_epochs
from outbox_plugin.core.leader_epochs import Finding, GroupPosition, LeaderEpochs
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox import positions, rereader
from outbox_plugin.inbox.assignments import Assignments
from outbox_plugin.inbox.handling import Handling
from outbox_plugin.inbox.key_queues import KeyQueues
from outbox_plugin.inbox.pauses import Pauses
from outbox_plugin.inbox.received import Received
from tests.simulation import inbox_kafka, inboxes
from tests.simulation.conftest import Seeds
from tests.simulation.inbox_kafka import polled
from tests.simulation.inbox_plan import KEEP_SECONDS, Plan
from tests.simulation.inboxes import Process, run

SCHEDULES = 1_600
SOON = 2_000


@pytest.fixture(autouse=True)
def _simulated_time() -> Iterator[None]:
    with inboxes.in_simulated_time():
        yield


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
    patch.setattr(LeaderEpochs, "is_truncated", lambda *_: False)


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
        if (finding := add(epochs, *record, **options)) is Finding.TRUNCATED:
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


def give_up_a_paused_partition_that_stays_paused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Assignments, "_unassign", lambda self, partitions: self._consumer.incremental_unassign(partitions))


def resume_in_name_only(patch: pytest.MonkeyPatch) -> None:
    def forget(pauses: Pauses, _: Any, partitions: Collection[TopicPartition]) -> None:
        pauses._paused -= {*partitions}

    patch.setattr(Pauses, "resume", forget)


def pass_over_what_was_fetched_ahead_of_a_pause(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inbox_kafka._Fetched, "pause", lambda fetched: fetched._ahead.clear())


def forget_all_partitions_where_one_begins(patch: pytest.MonkeyPatch) -> None:
    start = LeaderEpochs.start

    def forget_and_start(epochs: LeaderEpochs, tp: TopicPartition, position: GroupPosition | None) -> int | None:
        epochs._started.clear()
        return start(epochs, tp, position)

    patch.setattr(LeaderEpochs, "start", forget_and_start)


def give_up_all_partitions_where_one_moves(patch: pytest.MonkeyPatch) -> None:
    revoke = KeyQueues.revoke
    patch.setattr(KeyQueues, "revoke", lambda queues, _: revoke(queues, queues.partitions()))


def commit_each_position_with_the_epoch_of_another_partition(patch: pytest.MonkeyPatch) -> None:
    before = LeaderEpochs.before
    patch.setattr(
        LeaderEpochs,
        "before",
        lambda epochs, tp, offset: before(epochs, min(epochs._first_offsets, default=tp), offset),
    )


def handle_with(patch: pytest.MonkeyPatch, other: str, *, instead_of: str) -> None:
    """Let each `Handling` do one thing where it should do another one."""
    begin = Handling.__init__

    def begin_wrongly(handling: Any, *args: Any, **options: Any) -> None:
        begin(handling, *args, **options)
        setattr(handling, instead_of, getattr(handling, other))

    patch.setattr(Handling, "__init__", begin_wrongly)


def keep_a_dead_letter_whose_retry_succeeded(patch: pytest.MonkeyPatch) -> None:
    handle_with(patch, "_dead_letter_again", instead_of="_remove_letter")


def drop_a_dead_letter_whose_retry_failed(patch: pytest.MonkeyPatch) -> None:
    handle_with(patch, "_remove_letter", instead_of="_dead_letter_again")


def move_the_position_with_a_dead_letter(patch: pytest.MonkeyPatch) -> None:
    add = KeyQueues.add

    def add_and_move(queues: KeyQueues, record: Received) -> None:
        if record.dead_letter is not None:
            queues.leave_out(record)
        add(queues, record)

    patch.setattr(KeyQueues, "add", add_and_move)


def pass_over_a_record_that_is_spent(patch: pytest.MonkeyPatch) -> None:
    async def pass_over(*_: object) -> bool:
        return True

    patch.setattr(Handling, "_dead_lettered", pass_over)


def trust_librdkafka_with_an_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaderEpochs, "may_end_at_truncation", lambda *_: False)


def trust_librdkafka_with_a_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaderEpochs, "may_follow_truncation", lambda *_: False)


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
    (trust_librdkafka_with_a_cut, "before"),
    (trust_librdkafka_with_an_end, "waits for a later record"),
    (give_up_a_paused_partition_that_stays_paused, "has paused"),
    (resume_in_name_only, "has paused"),
    (pass_over_what_was_fetched_ahead_of_a_pause, "no effect"),
    (forget_all_partitions_where_one_begins, "twice"),
    (give_up_all_partitions_where_one_moves, "no effect"),
    (commit_each_position_with_the_epoch_of_another_partition, "before"),
    (keep_a_dead_letter_whose_retry_succeeded, "twice"),
    (drop_a_dead_letter_whose_retry_failed, "lost"),
    (move_the_position_with_a_dead_letter, "moved the positions"),
    (pass_over_a_record_that_is_spent, "no effect"),
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
    """A schedule that a test writes down, with one partition: nothing fails by chance."""

    def __init__(self) -> None:
        super().__init__(0, Plan(failures=0.0))
        [self.log] = self.kafka.logs.values()
        self.append(10, age=3 * KEEP_SECONDS)
        self.settle()

    @property
    def owner(self) -> Process:
        """The inbox that has the partition."""
        return self.owners[self.log.tp]

    def append(self, number: int, age: float = 0.0) -> None:
        """Append so many records, which are so many seconds old."""
        for _ in range(number):
            self.kafka.append(self.log, self.chance.now - age)

    def cut(self, end: int) -> None:
        """Cut the log. No client notices it by itself."""
        del self.log.records[end:]
        self.log.epoch += 1

    def messages(self, first: int, behind: int) -> list[Any]:
        """Records as librdkafka returns them, which has fetched them by now."""
        self.owner.client.assigned[self.log.tp].has_returned_up_to(behind)
        return [polled(self.log.tp, offset, self.log.records[offset]) for offset in range(first, behind)]

    def add(self, messages: list[Any], *, id_is_returned: bool = True) -> None:
        """Have the inbox take in what it polled. Kafka may not return the topic's id then."""
        ids, answer = self.owner.loop._topic_ids, self.owner.loop._topic_ids.look_up
        if not id_is_returned:
            ids.look_up = lambda _: Answer(recreated=set(), known=set())
        self.owner.loop.add(messages)
        ids.look_up = answer

    def handle_first(self) -> None:
        """Handle the first record that waits."""
        with patch.object(self.owner.dispatcher._batch_limit, "limit", lambda *_: 1):
            self._handle_by(self.owner)
        self._end_handlers()

    def judged(self) -> list[str]:
        """What is broken at the end, when all is well."""
        self.append(1)
        self.settle()
        self.check_end()
        return self.broken


def test_records_before_a_cut_that_were_fetched_and_not_polled_are_handled() -> None:
    """librdkafka goes back to the cut, and drops what it has fetched."""
    simulation = Scripted()
    simulation.append(6)
    simulation.cut(13)
    simulation.append(2)
    simulation.owner.client.assigned[simulation.log.tp].go_to(13)
    assert simulation.judged() == []


def test_they_do_not_wait_for_a_record_from_after_the_cut() -> None:
    simulation = Scripted()
    simulation.append(6)
    fetched = simulation.owner.client.assigned[simulation.log.tp]
    fetched.fetch()
    simulation.add(simulation.messages(10, 12))
    simulation.cut(13)
    fetched.go_to(13)
    simulation.settle()
    simulation.check_waiting()
    assert simulation.broken == []


def test_and_so_are_those_of_a_partition_of_which_nothing_was_polled() -> None:
    simulation = Scripted()
    simulation._recreate()
    simulation.settle()  # The inbox knows the topic by now.
    simulation.append(6)
    simulation.cut(3)
    simulation.append(2)
    simulation.owner.client.assigned[simulation.log.tp].go_to(3)
    assert simulation.judged() == []


def test_a_cut_is_noticed_where_a_paused_partition_goes_on_behind_it() -> None:
    """librdkafka had gone back to the beginning, and takes a pause for a reason to go on where it was before."""
    simulation = Scripted()
    simulation.cut(6)
    simulation.append(8)
    assert simulation.judged() == []


def test_a_new_leader_without_a_cut_repeats_nothing() -> None:
    simulation = Scripted()
    simulation.log.epoch += 1
    simulation.append(3, age=3 * KEEP_SECONDS)
    simulation.settle()
    simulation.postgres.handled.clear()
    assert simulation.judged() == []


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
    old = 3 * KEEP_SECONDS
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
    simulation._tick_by(simulation.owner)
    simulation._kill()
    simulation.cut(6)
    simulation.append(12)
    assert simulation.judged() == []


def test_a_recreated_topic_is_noticed_where_kafka_returns_its_id_only_when_the_record_comes_again() -> None:
    """Its records would count as those of the old topic, which are handled up to the position."""
    simulation = Scripted()
    simulation._recreate()
    simulation.append(1, age=3 * KEEP_SECONDS)
    simulation.add(simulation.messages(0, 1), id_is_returned=False)
    simulation.add(simulation.messages(0, 1))
    assert simulation.owner.topic_ids.of(simulation.log.tp.topic) == simulation.log.topic_id
    assert simulation.judged() == []
