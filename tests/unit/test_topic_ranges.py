"""Ranges and positions: no offset is left out, none is consumed twice, whatever is interleaved, retried or deleted."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.core.topic_ranges import Position, TopicRange, TopicState, plan, readable, remaining, shared
from outbox_plugin.errors import RangeRefused, TopicReplaced

ID = "uuid-1"


def at(*offsets: int, topic_id: str = ID) -> Position:
    return Position(topic_id, dict(enumerate(offsets)))


def state(*spans: tuple[int, int], topic_id: str = ID) -> TopicState:
    return TopicState(
        topic_id, {n: first for n, (first, _) in enumerate(spans)}, {n: end for n, (_, end) in enumerate(spans)}
    )


def span(*spans: tuple[int, int], topic_id: str = ID) -> TopicRange:
    begin, end = ({n: each[side] for n, each in enumerate(spans)} for side in (0, 1))
    return TopicRange("totals", "orders", topic_id, begin, end)


def test_a_new_consumer_begins_with_what_is_there() -> None:
    planned = plan("totals", "orders", None, state((5, 20), (0, 0)), 100)
    assert planned.range
    assert (planned.range.text(), planned.lag, planned.lost) == ("0:5-20", 15, 0)


def test_nothing_new_is_no_range() -> None:
    assert plan("totals", "orders", at(20, 7), state((5, 20), (0, 7)), 100).range is None


def test_a_new_partition_is_consumed_from_its_beginning() -> None:
    planned = plan("totals", "orders", at(20), state((5, 20), (0, 7)), 100)
    assert planned.range
    assert planned.range.text() == "1:0-7"


def test_what_was_deleted_of_a_new_partition_before_it_was_known_is_counted() -> None:
    """It was added after the consumer began, so all that it ever held is for the consumer."""
    planned = plan("totals", "orders", at(20), state((5, 20), (4, 7)), 100)
    assert planned.range
    assert (planned.range.text(), planned.lag, planned.lost) == ("1:0-7", 3, 4)


def test_what_was_deleted_before_a_consumer_began_is_not_counted() -> None:
    """Also of a partition that held nothing then: its first range says where each partition begins."""
    planned = plan("totals", "orders", None, state((5, 20), (9, 9), (3, 6)), 1)
    assert planned.range
    assert planned.range.text() == "0:5-6"
    rest = remaining(planned.range, None)
    assert rest.end == {0: 6, 1: 9, 2: 3}
    assert remaining(planned.range, Position(ID, {})) == rest
    assert plan("totals", "orders", Position(ID, rest.end), state((5, 20), (9, 12), (3, 6)), 100).lost == 0
    assert plan("totals", "orders", Position(ID, {}), state((5, 20)), 100).lost == 0


def test_deleted_offsets_are_counted_and_passed_over() -> None:
    planned = plan("totals", "orders", at(10), state((30, 50)), 5)
    assert planned.range
    assert (planned.range.text(), planned.lag, planned.lost) == ("0:10-35", 20, 20)
    there = readable(planned.range, state((30, 50)))
    assert (there.range.text(), there.lost) == ("0:30-35", 20)


def test_a_range_of_which_nothing_is_left_is_still_consumed_so_that_the_position_moves() -> None:
    planned = plan("totals", "orders", at(10), state((50, 50)), 5)
    assert planned.range
    assert (planned.range.text(), planned.lag, planned.lost) == ("0:10-50", 0, 40)
    there = readable(planned.range, state((50, 50)))
    assert (there.range.offsets, there.lost) == (0, 40)


def test_a_partition_that_ends_before_the_position_waits_and_the_others_go_on() -> None:
    planned = plan("totals", "orders", at(20, 3), state((0, 15), (0, 7)), 100)
    assert planned.range
    assert (planned.range.text(), planned.beyond) == ("1:3-7", (0,))


def test_a_topic_that_was_recreated_stops_its_consumer() -> None:
    with pytest.raises(TopicReplaced, match="was deleted and recreated"):
        plan("totals", "orders", at(20), state((0, 15), topic_id="uuid-2"), 100)
    with pytest.raises(TopicReplaced):
        remaining(span((0, 5)), at(0, topic_id="uuid-2"))
    with pytest.raises(TopicReplaced):
        readable(span((0, 5)), state((0, 15), topic_id="uuid-2"))


def test_what_is_left_of_a_range() -> None:
    wanted = span((10, 20), (0, 5))
    assert remaining(wanted, None) == wanted
    assert remaining(wanted, at(10, 0)) == wanted
    assert remaining(wanted, at(15, 5)).text() == "0:15-20"
    assert remaining(wanted, at(20, 9)).offsets == 0
    with pytest.raises(RangeRefused, match="would never be consumed"):
        remaining(wanted, at(9, 0))


def test_a_range_that_the_topic_does_not_reach_is_refused() -> None:
    with pytest.raises(RangeRefused, match="ends at 19, before the range does"):
        readable(span((10, 20)), state((0, 19)))


@pytest.mark.parametrize(("begin", "end"), [({0: 3}, {1: 4}), ({0: 3}, {0: 2}), ({0: -1}, {0: 2})])
def test_a_range_that_makes_no_sense_is_refused(begin: dict[int, int], end: dict[int, int]) -> None:
    with pytest.raises(RangeRefused):
        TopicRange("totals", "orders", ID, begin, end)


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 100)), st.integers(1, 200))
def test_a_bound_is_shared_and_not_wasted(waiting: dict[int, int], most: int) -> None:
    taken = shared(waiting, most)
    assert taken.keys() == waiting.keys()
    assert all(0 <= taken[each] <= waiting[each] for each in waiting)
    assert sum(taken.values()) == min(most, sum(waiting.values()))
    if len(waiting) <= most:  # Nobody starves.
        assert all(taken[each] for each in waiting if waiting[each])


class World:
    """A topic that grows and is deleted from, a position, and effects, counted by offset."""

    def __init__(self) -> None:
        self.first: dict[int, int] = {0: 0}
        self.end: dict[int, int] = {0: 0}
        self.position: Position | None = None
        self.effects: dict[tuple[int, int], int] = {}
        self.requested: list[TopicRange] = []
        self.began: dict[int, int] = {}
        self.lost = 0

    @property
    def state(self) -> TopicState:
        return TopicState(ID, dict(self.first), dict(self.end))

    def consume(self, wanted: TopicRange) -> None:
        """As a run does, in one transaction."""
        rest = remaining(wanted, self.position)
        there = readable(rest, self.state)
        for partition, first in there.range.begin.items():
            for offset in range(first, there.range.end[partition]):
                self.effects[partition, offset] = self.effects.get((partition, offset), 0) + 1
        known = self.position.next_offsets if self.position else {}
        if not known:
            self.began.update(rest.begin)
        self.lost += there.lost
        self.position = Position(ID, {**known, **rest.end})


@given(st.data())
def test_each_offset_has_its_effect_once_or_is_counted_as_lost(data: st.DataObject) -> None:
    world = World()
    for _ in range(data.draw(st.integers(1, 25))):
        step = data.draw(st.sampled_from(["write", "widen", "delete", "request", "run", "run again"]))
        partition = data.draw(st.sampled_from(sorted(world.end)))
        if step == "write":
            world.end[partition] += data.draw(st.integers(1, 20))
        elif step == "widen" and len(world.end) < 4:
            world.first[len(world.first)] = 0
            world.end[len(world.end)] = 0
        elif step == "delete":
            world.first[partition] = data.draw(st.integers(world.first[partition], world.end[partition]))
        elif step == "request":
            planned = plan("totals", "orders", world.position, world.state, data.draw(st.integers(1, 30)))
            if planned.range:
                assert planned.lag or planned.lost
                world.requested.append(planned.range)
        elif world.requested:  # Any run, in any order, any number of times.
            wanted = data.draw(st.sampled_from(world.requested))
            before = dict(world.position.next_offsets) if world.position else {}
            with suppress(RangeRefused):  # Another one, from before a deletion, came first.
                world.consume(wanted)
            if world.position is None:
                continue
            assert all(world.position.next_offsets[each] >= offset for each, offset in before.items())
    while (planned := plan("totals", "orders", world.position, world.state, 7)).range:
        world.consume(planned.range)
    assert set(world.effects.values()) <= {1}
    assert world.position is None or dict(world.position.next_offsets).items() <= world.end.items()
    for partition, end in world.end.items():
        had = {offset for each, offset in world.effects if each == partition}
        assert had >= set(range(world.first[partition], end))
    if world.position is not None:
        assert len(world.effects) + world.lost == sum(world.end.values()) - sum(world.began.values())


def test_a_range_is_named_in_one_line() -> None:
    assert span((1, 2), (3, 9)).text() == "0:1-2, 1:3-9"
    assert span((1, 2), (3, 9)).offsets == 7
