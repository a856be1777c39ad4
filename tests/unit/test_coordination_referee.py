"""The referee of the long run sees two live holders where there were two, and nowhere else."""

from __future__ import annotations

import pytest

from tests.chaos.coordination import _Held, _overlaps

A = _Held(begin=100, end=120, gained=10, lost=None, client="a")


@pytest.mark.parametrize(
    ("others", "overlaps"),
    [
        ([_Held(110, 130, 20, None, "b")], 1),
        ([_Held(121, 130, 20, None, "b")], 0),  # The first was silent for two intervals.
        ([_Held(110, 130, 20, None, "a")], 0),  # Its client came back,
        ([_Held(100, 130, 11, 12, "a"), _Held(110, 130, 20, None, "b")], 0),  # and gave it up, all in one second.
        ([_Held(100, 130, 11, 21, "a"), _Held(110, 130, 20, None, "b")], 1),
        ([_Held(100, 130, 21, 22, "a"), _Held(100, 130, 20, None, "b")], 2),  # It came back when another had it.
    ],
)
def test_two_live_holders_are_seen(others: list[_Held], overlaps: int) -> None:
    assert _overlaps([A, *others]) == _overlaps([*others, A]) == overlaps


@pytest.mark.parametrize(("lost", "overlaps"), [(19, 0), (20, 0), (21, 1)])
def test_what_was_given_up_before_another_began_was_not_held(lost: int, overlaps: int) -> None:
    assert _overlaps([A._replace(lost=lost), _Held(110, 130, 20, None, "b")]) == overlaps
