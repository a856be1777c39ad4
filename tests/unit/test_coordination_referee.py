"""The referee of the long run sees two live holders where there were two, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from outbox_plugin.coordination.consumer import BATCH, Guarantee
from tests.chaos.coordination_referee import (
    RECORDS,
    Findings,
    Plan,
    _Held,
    _overlaps,
    broken_promises,
    silences,
    stale_at,
)

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


@pytest.mark.parametrize(
    ("words", "others", "until"),
    [
        ([100, 104, 110], [], 130),
        ([100, 104, 190], [], 210),  # It was stopped, and nobody took the partition.
        ([100, 104, 190], [130], 124),  # It was stopped, and speaks before it has read that another has it.
        ([100, 104, 120], [122], 140),
        ([90, 100], [95], 120),
    ],
)
def test_a_word_of_one_who_was_stopped_counts_only_where_nobody_took_what_it_held(
    words: list[float], others: list[float], until: float
) -> None:
    assert stale_at(words, 100, others, 10) == until


@pytest.mark.parametrize(
    ("handed_out", "at_most_once", "found"),
    [
        ([(0, 10.0), (1, 12.5)], False, [(11.0, 12.5)]),
        ([(0, 10.0), (0, 15.0), (1, 15.1), (2, 30.0)], False, [(11.0, 15.0)]),  # 2 was written at 29.5.
        ([(0, 10.0), (2, 30.0)], False, [(11.0, 30.0)]),
        ([(0, 10.0), (2, 30.0)], True, []),  # 1 may have been lost with a process.
    ],
)
def test_a_silence_is_one_only_while_records_wait(
    handed_out: list[tuple[int, float]], at_most_once: bool, found: list[tuple[float, float]]
) -> None:
    ours = np.array([(0, *each) for each in handed_out], RECORDS)
    assert silences(ours, np.array([9.5, 11.0, 29.5]), at_most_once=at_most_once) == found


@pytest.mark.parametrize(
    ("guarantee", "lost", "broken"),
    [
        ("at-least-once", 1, ["lost: 1"]),
        ("at-most-once", 3 * BATCH, []),
        ("at-most-once", 3 * BATCH + 1, ["lost: 1"]),
    ],
)
def test_each_disturbed_process_may_lose_what_it_had_fetched(
    guarantee: Guarantee, lost: int, broken: list[str]
) -> None:
    found = Findings(lost=lost, kills=1, stops=1, holds=1, terminations=5)
    assert broken_promises(Plan(guarantee), found) == broken
