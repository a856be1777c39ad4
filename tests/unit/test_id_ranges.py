"""Sets of ids as ranges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.core.id_ranges import IdRanges

id_sets = st.sets(st.integers(min_value=-(2**62), max_value=2**62) | st.integers(0, 60), max_size=60)


def ranges(ids: set[int]) -> IdRanges:
    return IdRanges.of(sorted(ids))


@given(id_sets)
def test_a_set_of_ids_survives_its_text(ids: set[int]) -> None:
    assert list(IdRanges.parse(ranges(ids).text())) == sorted(ids)


@given(st.lists(st.sets(st.integers(0, 60)), max_size=5))
def test_the_union_holds_what_any_set_holds(sets: list[set[int]]) -> None:
    together = set().union(*sets)
    union = IdRanges.union(ranges(ids) for ids in sets)
    assert union == ranges(together)
    assert len(union) == len(together)


@given(st.sets(st.integers(0, 60)), st.integers(-1, 61))
def test_membership(ids: set[int], wanted: int) -> None:
    assert (wanted in ranges(ids)) == (wanted in ids)


def test_the_text_is_what_postgres_writes() -> None:
    assert IdRanges.of([1, 2, 3, 7]).text() == "{[1,4),[7,8)}"
    assert IdRanges().text() == "{}"


@pytest.mark.parametrize("text", ["", "[1,2)", "{[1,2]}", "{[1,2),}", "{(1,2)}", "{1}"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an int8multirange"):
        IdRanges.parse(text)
