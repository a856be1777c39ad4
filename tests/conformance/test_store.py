"""What the relay may take for granted of its store: the same of the real one and of the simulated one."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from outbox_plugin.core.bad_rows import BadRow
from outbox_plugin.core.id_ranges import IdRanges
from outbox_plugin.core.id_watermark import BEGINNING, IdRange, OpenWriters
from outbox_plugin.core.key_summary import HASH_BYTES
from outbox_plugin.core.ordering_key import OrderingKey
from outbox_plugin.core.postgres_ports import ReadRequest, ShardStore, WindowStore
from outbox_plugin.core.progress import Publication
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Slice
from outbox_plugin.errors import Fenced, LayoutChanged, Refusal, StoreUnavailable
from tests.conformance.outboxes import FIRST, Outbox, Scenario, real, run_simulated
from tests.support import eventually

ALL = 100
ONE, OTHER = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))


def written(outbox: Outbox, *keys: str) -> list[int]:
    """The ids of rows that were committed."""
    writing = outbox.begin()
    ids = [writing.insert(key) for key in keys]
    writing.commit()
    return ids


def seen(store: WindowStore, request: ReadRequest = ReadRequest(ALL)) -> list[int]:  # noqa: B008 - immutable.
    return [row.id for row in store.read(request)]


def bad(rows: list[OutboxRow], id_: int, *, whole_topic: bool = False) -> list[BadRow]:
    return [BadRow(row, Refusal("too large", whole_topic)) for row in rows if row.id == id_]


def assert_fenced(store: WindowStore, rows: list[OutboxRow]) -> None:
    for put_aside in (store.park, store.dead_letter):
        with pytest.raises(Fenced):
            put_aside(bad(rows, rows[0].id))


def a_read_returns_the_earliest_rows_that_are_wanted(outbox: Outbox) -> None:
    ids, store = written(outbox, *"abcdef"), outbox.windows()
    assert seen(store) == ids
    assert seen(store, ReadRequest(2, IdRange(ids[0]), in_flight=IdRanges.of([ids[2]]))) == [ids[1], ids[3]]
    assert seen(store, ReadRequest(ALL, excluded_keys=frozenset({OrderingKey("t", "b"), OrderingKey("u", "c")}))) == [
        ids[0],
        *ids[2:],
    ]
    assert seen(store, ReadRequest(ALL, excluded_keys=frozenset({OrderingKey("t", None)}))) == []
    assert seen(store, ReadRequest(ALL, IdRange(ids[1], ids[3]))) == ids[2:4]


def a_key_has_the_same_hash_wherever_it_is_asked_for(outbox: Outbox) -> None:
    ids, store = written(outbox, "a", "é", "", "A", "a", "b"), outbox.windows()
    hashes = store.key_hashes(store.read(ReadRequest(ALL)))
    assert len(set(hashes)) == 5
    assert hashes[0] == hashes[4]
    for upper, known in ((ids[-1], hashes), (ids[2], hashes[:3]), (ids[0] - 1, [])):
        assert b"".join(store.key_hashes_up_to(upper, ALL)) == b"".join(
            each.to_bytes(HASH_BYTES, "big") for each in known
        )


def a_whole_record_is_read_marked_and_purged_in_its_place(outbox: Outbox) -> None:
    writing = outbox.begin()
    ids = [writing.insert(key, whole=key == "w") for key in "awaww"]
    writing.commit()
    store, marks = outbox.windows(), outbox.marks()
    assert seen(store) == ids
    assert seen(store, ReadRequest(2, IdRange(ids[0]))) == ids[1:3]
    assert seen(store, ReadRequest(ALL, excluded_keys=frozenset({OrderingKey("t", "w")}))) == [ids[0], ids[2]]
    assert store.purge([Publication.of(store.read(ReadRequest(2)))]) == 2
    marks.lead(ONE)
    assert [row.id for row in marks.mark(ONE, ReadRequest(2))] == ids[2:4]
    assert [row.id for row in marks.mark(OTHER, ReadRequest(ALL))] == ids[2:]
    assert marks.delete(OTHER, ids) == 3


def a_row_is_seen_once_it_is_committed_whatever_its_id(outbox: Outbox) -> None:
    store, late, never = outbox.windows(), outbox.begin(), outbox.begin()
    early_id, _ = late.insert("a"), never.insert("a")
    later = written(outbox, "a")
    assert seen(store) == later
    never.roll_back()
    late.commit()
    assert seen(store) == [early_id, *later]


def an_id_below_zero_is_read(outbox: Outbox) -> None:
    writing = outbox.begin()
    writing.insert("a", -5)
    writing.commit()
    assert seen(outbox.windows()) == [-5]


def a_purge_deletes_what_was_read_and_nothing_that_came_later(outbox: Outbox) -> None:
    ids, store = written(outbox, *"abc"), outbox.windows()
    publication = Publication.of(store.read(ReadRequest(ALL)))
    outbox.delete(ids[1])
    writing = outbox.begin()
    writing.insert("b", ids[1], backdated=True)
    writing.commit()
    assert (store.purge([publication]), store.purge([publication])) == (2, 0)
    assert seen(store) == [ids[1]]


def a_purge_spares_what_was_created_later(outbox: Outbox) -> None:
    """After a restored backup transactions count on from an earlier one, so that those that are new may look old."""
    [id_], store = written(outbox, "a"), outbox.windows()
    publication = Publication.of(store.read(ReadRequest(ALL)))
    outbox.delete(id_)
    writing = outbox.begin()
    writing.insert("a", id_)
    writing.commit()
    assert store.purge([replace(publication, horizon=publication.horizon + 1_000)]) == 0


def the_snapshot_changes_when_a_transaction_ends(outbox: Outbox) -> None:
    store, writing, undone = outbox.windows(), outbox.begin(), outbox.begin()
    writing.insert("a")
    undone.insert("b")
    eventually(lambda: store.snapshot() == store.snapshot(), 10)  # The server has transactions of its own.
    before = store.snapshot()
    writing.commit()
    between = store.snapshot()
    undone.roll_back()
    assert len({before, between, store.snapshot()}) == 3


def control_names_those_who_hold_ids_that_they_may_still_commit(outbox: Outbox) -> None:
    store = outbox.windows()
    assert not store.control().sequence.writers
    idle, busy = outbox.begin(), outbox.begin()
    last_id = busy.insert("a")
    [writer] = store.control().sequence.writers
    assert store.control().sequence.last_id == last_id
    busy.commit()
    idle.insert("a")
    assert writer not in store.control().sequence.writers
    idle.roll_back()
    assert not store.control().sequence.writers
    assert store.control().sequence.last_id == last_id + 1


def a_read_passes_over_ids_only_while_all_their_writers_are_open(outbox: Outbox) -> None:
    store, large, undone = outbox.windows(), outbox.begin(), outbox.begin()
    first, second = large.insert("a"), undone.insert("b")
    [third] = written(outbox, "c")
    sequence = store.control().sequence
    assert sequence.transaction_ids.keys() == sequence.writers
    assert len(sequence.writers) == 2
    [fourth] = written(outbox, "d")
    writers = tuple(sequence.transaction_ids.values())
    request = ReadRequest(ALL, IdRange(BEGINNING, None, OpenWriters(third, writers)))
    assert seen(store, request) == [fourth]
    undone.roll_back()
    assert seen(store, request) == [third, fourth]
    large.commit()
    assert seen(store, request) == [first, third, fourth]
    assert second not in seen(store)


def a_lane_is_parked_by_a_row_that_is_there(outbox: Outbox) -> None:
    ids, store = written(outbox, *"aab"), outbox.windows()
    store.lead(ONE)
    rows = list(store.read(ReadRequest(ALL)))
    store.park(bad(rows, ids[0]))
    store.park(bad(rows, ids[1]))
    outbox.delete(ids[2])
    store.park(bad(rows, ids[2]))
    assert store.control().parked == {OrderingKey("t", "a")}
    store.park(bad(rows, ids[0], whole_topic=True))
    assert store.control().parked == {OrderingKey("t", "a"), OrderingKey("t", None)}


def a_dead_letter_has_left_the_outbox(outbox: Outbox) -> None:
    ids, store = written(outbox, *"ab"), outbox.windows()
    store.lead(ONE)
    rows = list(store.read(ReadRequest(ALL)))
    store.dead_letter(bad(rows, ids[0]))
    store.dead_letter(bad(rows, ids[0]))
    assert seen(store) == [ids[1]]
    assert outbox.dead_letters() == 1


def a_leader_puts_nothing_aside_once_another_leads(outbox: Outbox) -> None:
    ids, zombie, successor = written(outbox, "a"), outbox.windows(), outbox.windows()
    zombie.lead(ONE)
    rows = list(zombie.read(ReadRequest(ALL)))
    successor.lead(OTHER)
    assert_fenced(zombie, rows)
    assert seen(successor) == ids
    assert (outbox.dead_letters(), successor.control().parked) == (0, frozenset())
    successor.dead_letter(bad(rows, ids[0]))
    assert (seen(successor), outbox.dead_letters()) == ([], 1)


def only_the_leader_raises_the_generation(outbox: Outbox) -> None:
    zombie, leader, slice_ = outbox.windows(), outbox.windows(), Slice(0, 1)
    zombie.lead(ONE)
    zombie.check_leads()
    assert zombie.generation(slice_) == 0
    assert zombie.raise_generation(slice_, 0) == 1
    leader.lead(OTHER)
    with pytest.raises(Fenced):
        zombie.check_leads()
    with pytest.raises(Fenced):
        zombie.raise_generation(slice_, 1)
    leader.check_leads()
    assert leader.generation(slice_) == 1
    assert leader.generation(Slice(0, 2)) == 0
    assert leader.raise_generation(slice_, 1) == 2
    assert leader.raise_generation(slice_, 7) == 8  # A database that was restored had forgotten some.
    outbox.change_layout(2)
    with pytest.raises(StoreUnavailable):
        leader.generation(slice_)
    with pytest.raises(Fenced):
        leader.raise_generation(slice_, 8)


def a_leader_puts_aside_for_its_own_shard(outbox: Outbox) -> None:
    ids = written(outbox, "a")
    layout = outbox.change_layout(2)
    first, second = outbox.windows(0, layout), outbox.windows(1, layout)
    first.lead(ONE)
    second.lead(OTHER)
    [led] = [store for store in (first, second) if seen(store)]
    led.dead_letter(bad(list(led.read(ReadRequest(ALL))), ids[0]))
    assert outbox.dead_letters() == 1


def nobody_leads_under_another_layout(outbox: Outbox) -> None:
    former: list[ShardStore] = [outbox.windows(), outbox.marks()]
    outbox.change_layout(2)
    for store in former:
        with pytest.raises(StoreUnavailable, match="number of shards"):
            store.lead(ONE)


def nobody_leads_a_table_that_is_another_one_by_now(outbox: Outbox) -> None:
    former: list[ShardStore] = [outbox.windows(), outbox.marks()]
    outbox.truncate()
    for store in former:
        with pytest.raises(StoreUnavailable, match="truncated"):
            store.lead(ONE)
    outbox.windows().lead(ONE)


def under_another_layout_nothing_is_put_aside(outbox: Outbox) -> None:
    written(outbox, "a")
    store = outbox.windows()
    store.lead(ONE)
    rows = list(store.read(ReadRequest(ALL)))
    outbox.change_layout(2)
    assert_fenced(store, rows)


def of_another_table_nothing_is_put_aside(outbox: Outbox) -> None:
    """The ids of a table that was truncated may be new rows'."""
    [id_], store = written(outbox, "a"), outbox.windows()
    store.lead(ONE)
    rows = list(store.read(ReadRequest(ALL)))
    outbox.truncate()
    assert written(outbox, "b") == [id_]
    assert_fenced(store, rows)
    assert seen(outbox.windows()) == [id_]


def an_order_to_pause_is_heard(outbox: Outbox) -> None:
    store = outbox.windows()
    assert not store.control().paused
    outbox.pause()
    assert store.control().paused


def under_another_layout_nothing_is_read(outbox: Outbox) -> None:
    ids, store = written(outbox, *"abcdefgh"), outbox.windows()
    marks = outbox.marks()
    marks.lead(ONE)
    layout = outbox.change_layout(2)
    assert seen(store) == []
    assert list(marks.mark(ONE, ReadRequest(ALL))) == []
    with pytest.raises(LayoutChanged):
        store.control()
    with pytest.raises(LayoutChanged):
        outbox.windows(0, FIRST)
    halves = [seen(outbox.windows(shard, layout)) for shard in (0, 1)]
    assert sorted(halves[0] + halves[1]) == ids
    assert all(halves)


def a_mark_is_taken_over_and_an_old_one_does_nothing(outbox: Outbox) -> None:
    ids, store = written(outbox, *"abcd"), outbox.marks()
    store.lead(ONE)
    assert [row.id for row in store.mark(ONE, ReadRequest(3))] == ids[:3]
    assert list(store.mark(ONE, ReadRequest(3, IdRange(ids[0], ids[2])))) == []
    assert [row.id for row in store.mark(ONE, ReadRequest(3))] == ids[3:]
    assert [
        row.id for row in store.mark(OTHER, ReadRequest(2, excluded_keys=frozenset({OrderingKey("t", "a")})))
    ] == ids[1:3]
    assert store.delete(ONE, ids) == 2
    store.reset(ONE, ids)
    assert list(store.mark(OTHER, ReadRequest(ALL))) == []
    store.reset(OTHER, ids[1:2])
    assert [row.id for row in store.mark(OTHER, ReadRequest(ALL))] == ids[1:2]


def a_leader_that_was_replaced_marks_nothing(outbox: Outbox) -> None:
    ids, old, new = written(outbox, *"abcd"), outbox.marks(), outbox.marks()
    old.lead(ONE)
    assert [row.id for row in old.mark(ONE, ReadRequest(2))] == ids[:2]
    old.check_leads()
    old.control()
    new.lead(OTHER)
    assert list(old.mark(ONE, ReadRequest(ALL))) == []
    with pytest.raises(Fenced):
        old.check_leads()
    with pytest.raises(Fenced):
        old.control()
    assert old.delete(ONE, ids[:1]) == 1  # What it has delivered need not be repeated.
    assert [row.id for row in new.mark(OTHER, ReadRequest(ALL))] == ids[1:]
    old.reset(ONE, ids)
    assert list(new.mark(OTHER, ReadRequest(ALL))) == []


SCENARIOS: list[Scenario] = [
    a_read_returns_the_earliest_rows_that_are_wanted,
    a_key_has_the_same_hash_wherever_it_is_asked_for,
    a_whole_record_is_read_marked_and_purged_in_its_place,
    a_row_is_seen_once_it_is_committed_whatever_its_id,
    an_id_below_zero_is_read,
    a_purge_deletes_what_was_read_and_nothing_that_came_later,
    a_purge_spares_what_was_created_later,
    the_snapshot_changes_when_a_transaction_ends,
    control_names_those_who_hold_ids_that_they_may_still_commit,
    a_read_passes_over_ids_only_while_all_their_writers_are_open,
    a_lane_is_parked_by_a_row_that_is_there,
    a_dead_letter_has_left_the_outbox,
    a_leader_puts_nothing_aside_once_another_leads,
    only_the_leader_raises_the_generation,
    a_leader_puts_aside_for_its_own_shard,
    nobody_leads_under_another_layout,
    nobody_leads_a_table_that_is_another_one_by_now,
    under_another_layout_nothing_is_put_aside,
    of_another_table_nothing_is_put_aside,
    an_order_to_pause_is_heard,
    under_another_layout_nothing_is_read,
    a_mark_is_taken_over_and_an_old_one_does_nothing,
    a_leader_that_was_replaced_marks_nothing,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_simulated(scenario: Scenario) -> None:
    run_simulated(scenario)


@pytest.mark.integration
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_real(scenario: Scenario, dsn: str) -> None:
    with real(dsn) as outbox:
        scenario(outbox)
