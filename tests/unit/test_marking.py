"""At-least-once: the rounds in which marked rows are sent, and what follows from what became of a round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.core.bad_rows import BadRow
from outbox_plugin.core.marking import RoundResult, resolve_round, rounds
from outbox_plugin.core.row import OutboxRow, Rows
from outbox_plugin.errors import Refusal

Keyed = tuple[int, str, str]  # A row's id, topic and key.


def row(id_: int, topic: str, key: str) -> OutboxRow:
    return OutboxRow(id_, 0, topic, key, "v", [], [], 0)


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        pytest.param([], [], id="nothing was marked"),
        pytest.param([(1, "t", "a")], [[1]], id="one row"),
        pytest.param([(1, "t", "a"), (2, "t", "b"), (3, "t", "c")], [[1, 2, 3]], id="different keys go together"),
        pytest.param([(1, "t", "a"), (2, "t", "a"), (3, "t", "a")], [[1], [2], [3]], id="one key goes row by row"),
        pytest.param([(1, "t", "a"), (2, "u", "a")], [[1, 2]], id="one key of two topics is two keys"),
        pytest.param(
            [(1, "t", "a"), (2, "t", "a"), (3, "t", "b"), (4, "t", "b"), (5, "t", "c")],
            [[1, 3, 5], [2, 4]],
            id="a key's second row waits, other keys' first rows do not",
        ),
        pytest.param(
            [(1, "t", "a"), (2, "t", "a"), (3, "t", "a"), (4, "t", "b")],
            [[1, 4], [2], [3]],
            id="a hot key does not hold up a later row of another key",
        ),
        pytest.param([(-7, "t", "a"), (0, "t", "a"), (9, "t", "")], [[-7, 9], [0]], id="any id, and an empty key"),
    ],
)
def test_rows_are_sorted_into_rounds(marked: list[Keyed], expected: list[list[int]]) -> None:
    rows = [row(*keyed) for keyed in marked]
    assert [[each.id for each in round_] for round_ in rounds(rows)] == expected
    assert [[each.id for each in round_] for round_ in rounds(Rows(rows))] == expected  # As a read returns them.


@given(st.lists(st.tuples(st.sampled_from("tu"), st.sampled_from("abc")), max_size=30))
def test_rounds_hold_every_row_once_and_no_row_overtakes_another_of_its_key(keyed: list[tuple[str, str]]) -> None:
    rows = [row(id_, topic, key) for id_, (topic, key) in enumerate(keyed)]
    sent = [list(round_) for round_ in rounds(rows)]
    assert sorted(each for round_ in sent for each in round_) == rows
    for round_ in sent:
        assert round_
        assert len({(each.topic, each.key) for each in round_}) == len(round_)
    for topic, key in set(keyed):
        of_key = [each.id for round_ in sent for each in round_ if (each.topic, each.key) == (topic, key)]
        assert of_key == sorted(of_key)
    assert len(sent) == max((keyed.count(each) for each in keyed), default=0)  # No more rounds than needed.


ROUND = [row(1, "t", "a"), row(2, "t", "b"), row(3, "u", "a")]
BEHIND = [row(4, "t", "a"), row(5, "u", "c")]
BAD, BAD_TOPIC = Refusal("too large"), Refusal("no such topic", whole_topic=True)


@pytest.mark.parametrize(
    ("done", "refused", "bad", "reset"),
    [
        pytest.param({1, 2, 3}, {}, [], [], id="all delivered: nothing is marked anew"),
        pytest.param({1, 3}, {}, [], [2, 4, 5], id="unknown: the row, and all that waits, are marked anew"),
        pytest.param(set(), {}, [], [1, 2, 3, 4, 5], id="nothing delivered"),
        pytest.param({1, 3}, {2: BAD}, [2], [2, 4, 5], id="refused: its key is to be parked"),
        pytest.param({3}, {2: BAD}, [2], [1, 2, 4, 5], id="one refused, another one unknown"),
        pytest.param({3}, {1: BAD, 2: BAD}, [1, 2], [1, 2, 4, 5], id="each key has its own bad row"),
        pytest.param({3}, {1: BAD_TOPIC, 2: BAD_TOPIC}, [1], [1, 2, 4, 5], id="a topic is parked once"),
        pytest.param({3}, {1: BAD, 2: BAD_TOPIC}, [2], [1, 2, 4, 5], id="a parked topic has its keys in it"),
        pytest.param(set(), {1: BAD_TOPIC, 3: BAD}, [1, 3], [1, 2, 3, 4, 5], id="other topics are their own matter"),
    ],
)
def test_what_follows_from_a_round(
    done: set[int], refused: dict[int, Refusal], bad: list[int], reset: list[int]
) -> None:
    result = resolve_round(ROUND, done, refused, BEHIND)
    by_id = {each.id: each for each in ROUND}
    assert result == RoundResult(tuple(BadRow(by_id[id_], refused[id_]) for id_ in bad), tuple(reset))


@given(st.sets(st.integers(1, 3)), st.sets(st.integers(1, 3)))
def test_what_is_not_done_is_marked_anew_with_all_that_waits(done: set[int], refused: set[int]) -> None:
    result = resolve_round(ROUND, done - refused, dict.fromkeys(refused, BAD), BEHIND)
    left = [each.id for each in ROUND if each.id not in done - refused]
    assert list(result.reset) == (left + [each.id for each in BEHIND] if left else [])
    assert {each.row.id for each in result.bad} == refused  # Each row of a round has a key of its own.
