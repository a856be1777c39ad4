"""When live rows are read before a backlog, and what keeps the order of each key."""

from __future__ import annotations

import pytest

from outbox_plugin.core.backlog import (
    MIN_BACKLOG_IDS,
    PAUSE_SECONDS,
    SEARCH_SECONDS,
    SUMMARY_PAUSE_SECONDS,
    SUMMARY_REST,
    SUMMARY_REST_SECONDS,
    Backlog,
    SummaryRequest,
)
from outbox_plugin.core.id_watermark import IdWatermark, SequenceState

BOUND = 10 + MIN_BACKLOG_IDS


def ids(settled: int, last_drawn: int) -> IdWatermark:
    """All rows up to 10 have been read, and no row can appear up to `settled`; a writer holds ids above that."""
    watermark = IdWatermark()
    watermark.update(SequenceState(settled, frozenset()))
    watermark.read_ended(10, now=0.0)
    watermark.update(SequenceState(last_drawn, frozenset({"writer"})))
    return watermark


def behind(*, many: bool = True) -> Backlog:
    """One whose last read ended at id 10, with a backlog up to `BOUND`; ids are being drawn."""
    backlog = Backlog()
    assert backlog.due(0.0, ids(0, BOUND)) is None
    backlog.read_ended(10, 0.0, many=many, is_split=False)
    assert backlog.due(0.0, ids(0, BOUND)) is None
    return backlog


def test_a_bound_is_due_when_rows_fall_far_behind_while_ids_are_drawn() -> None:
    assert behind().due(0.1, ids(BOUND, BOUND + 1)) == SummaryRequest(BOUND, 10, MIN_BACKLOG_IDS)


@pytest.mark.parametrize(
    ("backlog", "settled", "last_drawn"),
    [
        pytest.param(behind(), BOUND, BOUND, id="nobody draws ids"),
        pytest.param(behind(), BOUND - 1, BOUND + 1, id="too few ids"),
        pytest.param(behind(many=False), BOUND, BOUND + 1, id="the last read has found few rows"),
    ],
)
def test_otherwise_none_is(backlog: Backlog, settled: int, last_drawn: int) -> None:
    assert backlog.due(0.1, ids(settled, last_drawn)) is None


def test_none_is_while_the_rows_are_to_be_read_from_the_beginning_again() -> None:
    """As when a parked key was released: until the next read, nobody knows how many rows there may be."""
    backlog, watermark = behind(), ids(BOUND, BOUND + 1)
    watermark.reset()
    assert backlog.due(0.1, watermark) is None
    watermark.read_ended(10, now=0.1)
    assert backlog.due(0.2, watermark) == SummaryRequest(BOUND, 10, MIN_BACKLOG_IDS)


def test_ids_that_were_drawn_before_the_rows_fell_behind_are_no_new_ones() -> None:
    """As where a batch is committed, and nobody else writes."""
    backlog = Backlog()
    assert backlog.due(0.0, ids(0, 9)) is None
    backlog.read_ended(10, 0.1, many=True, is_split=False)
    assert backlog.due(0.2, ids(0, BOUND)) is None
    backlog.read_ended(10, 0.3, many=True, is_split=False)
    assert backlog.due(0.4, ids(BOUND, BOUND)) is None


def test_one_summary_is_made_at_a_time_and_a_long_one_is_followed_by_a_long_rest() -> None:
    backlog = behind()
    assert backlog.due(1.0, ids(BOUND, BOUND + 1))
    assert not backlog.due(2.0, ids(BOUND + 1, BOUND + 2))
    backlog.summary_ended(3.0)
    assert not backlog.due(3.0 + SUMMARY_REST * 2.0 - 0.1, ids(BOUND + 2, BOUND + 3))
    assert backlog.due(3.0 + SUMMARY_REST * 2.0, ids(BOUND + 3, BOUND + 4))


def test_a_short_one_is_followed_by_some_rest() -> None:
    backlog = behind()
    assert backlog.due(1.0, ids(BOUND, BOUND + 1))
    backlog.summary_ended(1.0)
    assert not backlog.due(0.9 + SUMMARY_REST_SECONDS, ids(BOUND + 1, BOUND + 2))
    assert backlog.due(1.0 + SUMMARY_REST_SECONDS, ids(BOUND + 2, BOUND + 3))


def test_a_bound_is_searched_for_a_while_after_the_rows_fell_behind() -> None:
    backlog = behind()
    assert backlog.is_searching(SEARCH_SECONDS / 2)
    assert not backlog.is_searching(SEARCH_SECONDS)


def test_it_is_searched_no_more_once_it_is_found_or_once_the_rows_are_read() -> None:
    backlog = behind()
    assert backlog.due(0.1, ids(BOUND, BOUND + 1))
    assert not backlog.is_searching(0.2)
    backlog = behind()
    backlog.read_ended(None, 0.1, many=False, is_split=False)
    assert not backlog.is_searching(0.2)


def test_reads_pause_for_a_moment_when_the_rows_have_fallen_behind() -> None:
    backlog = behind()
    assert backlog.pauses_reads(PAUSE_SECONDS / 2)
    assert not backlog.pauses_reads(PAUSE_SECONDS)


def test_reads_pause_while_keys_are_summarised_but_not_for_long() -> None:
    backlog = behind()
    request = backlog.due(0.01, ids(BOUND, BOUND + 1))
    assert request is not None
    pause = SUMMARY_PAUSE_SECONDS * request.ids
    assert backlog.pauses_reads(0.01 + 0.9 * pause)
    assert not backlog.pauses_reads(0.01 + 1.1 * pause)
    assert backlog.is_summarising
    backlog.summary_ended(0.02)
    assert not backlog.pauses_reads(0.02)


def test_rows_that_are_about_as_far_behind_as_they_may_be_do_not_fall_behind_again_and_again() -> None:
    backlog = behind()
    backlog.read_ended(11 + MIN_BACKLOG_IDS // 2, 0.5, many=True, is_split=False)
    backlog.read_ended(10, 0.6, many=True, is_split=False)
    assert backlog.pauses_reads(0.6 + PAUSE_SECONDS / 2)
    backlog.read_ended(9 + MIN_BACKLOG_IDS // 2, 0.7, many=True, is_split=False)
    backlog.read_ended(10, 0.8, many=True, is_split=False)
    assert not backlog.pauses_reads(0.8)


def test_no_live_row_may_pass_a_row_above_the_bound_that_was_read_in_line() -> None:
    backlog = behind()
    backlog.read_ended(BOUND + 1, 0.1, many=True, is_split=False)
    backlog.read_ended(5, 0.2, many=True, is_split=False)  # From the beginning: keys were released.
    assert not backlog.may_split(BOUND, is_split=False)
    assert backlog.may_split(BOUND + 1, is_split=False)


def test_live_rows_that_were_read_keep_their_order_whatever_the_bound_is() -> None:
    backlog = behind()
    backlog.read_ended(BOUND + 1, 0.1, many=True, is_split=True)
    assert backlog.may_split(BOUND, is_split=True)
    assert backlog.may_split(BOUND, is_split=False)


def test_a_summary_is_of_no_use_once_the_sequence_was_set_back() -> None:
    backlog = behind()
    assert backlog.due(0.1, ids(BOUND, BOUND + 1))
    backlog.sequence_was_set_back()
    backlog.summary_ended(0.2)
    assert not backlog.may_split(BOUND, is_split=False)


def test_none_is_due_up_to_a_bound_that_rows_were_read_beyond() -> None:
    backlog = behind()
    backlog.read_ended(BOUND + 5, 0.1, many=True, is_split=False)
    backlog.read_ended(10, 0.2, many=True, is_split=False)
    assert backlog.due(0.3, ids(BOUND + 4, BOUND + 6)) is None  # Whether ids are drawn is seen by the next.
    assert backlog.due(0.3, ids(BOUND + 4, BOUND + 9)) is None
    assert backlog.due(0.4, ids(BOUND + 5, BOUND + 9)) == SummaryRequest(BOUND + 5, BOUND + 5, MIN_BACKLOG_IDS + 5)


def test_a_new_backlog_has_all_rows_of_the_one_before() -> None:
    """Its summary is as large as that asks for, however few of them are new."""
    backlog, watermark = behind(), ids(3 * BOUND, 3 * BOUND + 9)
    watermark.split(BOUND)
    assert backlog.due(0.1, watermark) == SummaryRequest(3 * BOUND, BOUND, 3 * BOUND - 10)


def test_nothing_is_searched_while_a_long_summary_is_followed_by_a_rest() -> None:
    backlog = behind()
    assert backlog.due(1.0, ids(BOUND, BOUND + 1))
    backlog.summary_ended(3.0)
    backlog.read_ended(None, 3.0, many=False, is_split=False)
    backlog.read_ended(10, 5.0, many=True, is_split=False)
    assert not backlog.is_searching(5.0)
    assert not backlog.pauses_reads(5.0)
