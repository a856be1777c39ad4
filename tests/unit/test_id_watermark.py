"""The id watermark: how far it may rise, and how rows below it are found all the same."""

from __future__ import annotations

import pytest

from outbox_plugin.core.id_watermark import (
    BEGINNING,
    PASS_OVER_SECONDS,
    SWEEP_BUSY_SECONDS,
    SWEEP_IDS,
    SWEEP_REST,
    SWEEP_SECONDS,
    IdRange,
    IdWatermark,
    OpenWriters,
    SequenceState,
    with_epoch,
)


def settled_at(last_id: int, *, at: int) -> IdWatermark:
    """A watermark that stands at `at`, with ids drawn up to `last_id`; all below it was walked at the time 0."""
    watermark = IdWatermark()
    watermark.update(SequenceState(last_id, frozenset()))
    watermark.read_ended(at, now=0.0)
    assert watermark.to_read == IdRange(at)
    return watermark


def due(watermark: IdWatermark, now: float, *, busy: bool = False) -> IdRange:
    slice_ = watermark.slice_due(now, busy=busy)
    assert slice_ is not None
    return slice_


def sweep(watermark: IdWatermark, began: float, seconds: float) -> None:
    """All of a sweep that is due; it finds nothing, and its first slice takes so long."""
    ends = began + seconds
    while (slice_ := watermark.slice_due(began, busy=False)) is not None:
        watermark.slice_ended(slice_, None, began, ends)
        began = ends


def test_it_rises_to_what_was_read_and_no_further() -> None:
    watermark = settled_at(9, at=5)
    watermark.read_ended(7, now=1.0)
    assert watermark.to_read == IdRange(7)


def test_it_waits_for_everybody_who_may_have_drawn_a_lower_id() -> None:
    watermark = IdWatermark()
    watermark.update(SequenceState(9, frozenset({"a", "b"})))
    watermark.update(SequenceState(12, frozenset({"b"})))
    watermark.read_ended(12, now=0.0)
    assert watermark.to_read == IdRange(0)
    watermark.update(SequenceState(15, frozenset({"b", "c"})))
    watermark.update(SequenceState(18, frozenset({"c"})))
    watermark.read_ended(17, now=0.0)
    assert watermark.to_read == IdRange(9)  # c may have drawn ids before it was first seen.
    watermark.update(SequenceState(21, frozenset({"d"})))
    watermark.read_ended(20, now=0.0)
    assert watermark.to_read == IdRange(18)


def test_a_prepared_transaction_holds_it_where_it_is() -> None:
    watermark = IdWatermark()
    watermark.update(SequenceState(9, frozenset({"3/1"})))
    watermark.update(SequenceState(9, frozenset({"-1/7"})))
    watermark.read_ended(None, now=0.0)
    assert watermark.to_read == IdRange(0)


def test_before_the_first_read_all_is_read_and_nothing_swept() -> None:
    watermark = IdWatermark()
    assert watermark.to_read == IdRange(BEGINNING)
    assert watermark.slice_due(1e9, busy=False) is None


def test_a_sweep_finds_ids_of_any_sign() -> None:
    watermark = settled_at(9, at=9)
    assert watermark.slice_due(SWEEP_SECONDS - 1, busy=False) is None
    assert due(watermark, SWEEP_SECONDS) == IdRange(BEGINNING, 9)


def test_what_was_deleted_since_the_last_sweep_is_swept_in_slices() -> None:
    """And what is deleted meanwhile too; reads go on from the watermark between them."""
    watermark = settled_at(10 * SWEEP_IDS, at=9)
    watermark.read_ended(9 + SWEEP_IDS, now=1.0)
    slices = []
    while (slice_ := watermark.slice_due(SWEEP_SECONDS, busy=False)) is not None:
        watermark.slice_ended(slice_, None, SWEEP_SECONDS, SWEEP_SECONDS)
        slices.append(slice_)
        if len(slices) == 1:
            watermark.read_ended(10 + SWEEP_IDS, now=SWEEP_SECONDS)
        assert watermark.to_read == IdRange(10 + SWEEP_IDS)
    assert slices == [IdRange(BEGINNING, 9), IdRange(9, 9 + SWEEP_IDS), IdRange(9 + SWEEP_IDS, 10 + SWEEP_IDS)]
    assert not watermark.sweeping
    assert due(watermark, 2 * SWEEP_SECONDS) == IdRange(BEGINNING, 10 + SWEEP_IDS)


def test_a_sweep_that_finds_rows_goes_on_behind_them() -> None:
    watermark = settled_at(1_000, at=1_000)
    watermark.slice_ended(due(watermark, 30.0), 300, began=30.0, now=30.0)
    assert watermark.sweeping
    assert due(watermark, 30.0) == IdRange(300, 1_000)
    watermark.slice_ended(IdRange(300, 1_000), None, began=30.0, now=30.0)
    assert watermark.slice_due(30.0, busy=False) is None
    assert due(watermark, 30.0 + SWEEP_SECONDS) == IdRange(BEGINNING, 1_000)


def test_while_rows_come_in_masses_a_sweep_waits_but_not_for_ever() -> None:
    watermark = settled_at(9, at=9)
    assert watermark.slice_due(SWEEP_SECONDS + SWEEP_BUSY_SECONDS - 1, busy=True) is None
    assert due(watermark, SWEEP_SECONDS + SWEEP_BUSY_SECONDS, busy=True) == IdRange(BEGINNING, 9)


def test_sweeps_that_take_long_come_seldom() -> None:
    watermark = settled_at(9, at=9)
    sweep(watermark, 30.0, seconds=2.0)
    assert due(watermark, 32.0 + SWEEP_SECONDS)  # The first may have been held up by chance.
    sweep(watermark, 62.0, seconds=3.0)
    assert watermark.slice_due(65.0 + 2.0 * SWEEP_REST - 1.0, busy=False) is None
    assert due(watermark, 65.0 + 2.0 * SWEEP_REST)


def test_it_falls_when_ids_are_drawn_from_the_start_again() -> None:
    watermark = settled_at(9, at=9)
    assert due(watermark, SWEEP_SECONDS)
    watermark.update(SequenceState(3, frozenset({"a"})))
    assert watermark.to_read == IdRange(BEGINNING)
    assert not watermark.sweeping


def test_where_reads_are_split_there_are_two_watermarks() -> None:
    watermark = settled_at(100, at=5)
    watermark.split(50)
    assert watermark.to_read == IdRange(5, 50)
    assert watermark.live_to_read == IdRange(50)
    watermark.read_ended(9, now=1.0)
    watermark.live_read_ended(60, now=1.0)
    assert watermark.to_read == IdRange(9, 50)
    assert watermark.live_to_read == IdRange(60)
    watermark.read_ended(None, now=1.0)
    assert watermark.to_read == IdRange(50, 50)
    watermark.join()
    assert watermark.to_read == IdRange(50)


def test_the_watermark_of_live_rows_waits_for_lower_ids_too() -> None:
    watermark = settled_at(100, at=5)
    watermark.split(50)
    watermark.update(SequenceState(130, frozenset({"a"})))
    watermark.live_read_ended(120, now=1.0)
    assert watermark.live_to_read == IdRange(100)
    watermark.live_read_ended(None, now=1.0)
    assert watermark.live_to_read == IdRange(100)


def test_from_the_beginning_means_from_the_bound_for_live_rows() -> None:
    watermark = settled_at(100, at=5)
    watermark.split(50)
    watermark.live_read_ended(60, now=1.0)
    watermark.reset()
    assert watermark.to_read == IdRange(BEGINNING, 50)
    assert watermark.live_to_read == IdRange(50)


def test_a_sequence_that_is_set_back_ends_the_split() -> None:
    watermark = settled_at(100, at=5)
    watermark.split(50)
    watermark.update(SequenceState(20, frozenset()))
    assert not watermark.is_split
    assert watermark.to_read == IdRange(BEGINNING)


def drawn(last_id: int, **open_writers: int | None) -> SequenceState:
    """The state of the sequence; each open writer has a transaction id, or none yet."""
    known = {writer: each for writer, each in open_writers.items() if each is not None}
    return SequenceState(last_id, frozenset(open_writers), known)


def beside_a_large_transaction() -> IdWatermark:
    """One whose last read returned the last row below 100; transaction 7 was open before that, and still is."""
    watermark = settled_at(10, at=10)
    watermark.read_ended(None, now=0.0)
    watermark.update(drawn(50, batch=7))
    watermark.update(drawn(100, batch=7))
    watermark.update(drawn(130, batch=7))
    watermark.read_ended(120, now=1.0)
    return watermark


def test_a_read_passes_over_the_ids_that_only_open_transactions_can_commit_rows_of() -> None:
    assert beside_a_large_transaction().to_read == IdRange(10, None, OpenWriters(100, (7,)))


def test_it_passes_over_none_that_have_not_been_read() -> None:
    watermark = beside_a_large_transaction()
    watermark.update(drawn(400, batch=7))
    watermark.update(drawn(500, batch=7, short=8))
    assert watermark.to_read == IdRange(10, None, OpenWriters(100, (7,)))  # As before, until a read has gone further.
    watermark.read_ended(300, now=1.1)  # It returned as many rows as it may.
    assert watermark.to_read == IdRange(10, None, OpenWriters(300, (7,)))
    watermark.read_ended(None, now=1.2)
    assert watermark.to_read == IdRange(10, None, OpenWriters(400, (7,)))


@pytest.mark.parametrize(
    "states",
    [
        pytest.param([drawn(200)], id="the writer has ended"),
        pytest.param([drawn(200, short=8)], id="another writer is open"),
        pytest.param([drawn(200, batch=7, early=None), drawn(300, batch=7, early=None)], id="one has no id yet"),
        pytest.param(
            [SequenceState(200, frozenset({"-1/7", "batch"}), {"batch": 7})], id="one is prepared, and hidden"
        ),
        pytest.param([drawn(90, batch=7)], id="the sequence was set back"),
    ],
)
def test_it_passes_over_none_where_it_is_not_known_who_may_commit_rows(states: list[SequenceState]) -> None:
    watermark = beside_a_large_transaction()
    for state in states:
        watermark.update(state)
    watermark.read_ended(None, now=1.1)
    assert watermark.to_read.open_writers is None


def test_from_the_beginning_means_over_nothing() -> None:
    watermark = beside_a_large_transaction()
    watermark.reset()
    assert watermark.to_read == IdRange(BEGINNING)


def test_somebody_may_have_chosen_an_id_so_all_are_read_now_and_then() -> None:
    watermark = beside_a_large_transaction()
    watermark.read_ended(None, now=PASS_OVER_SECONDS)
    assert watermark.to_read == IdRange(10)
    watermark.read_ended(None, now=PASS_OVER_SECONDS + 1.0)
    assert watermark.to_read == IdRange(10, None, OpenWriters(100, (7,)))


def test_live_reads_pass_over_such_ids_too_and_those_of_the_backlog_need_not() -> None:
    watermark = settled_at(100, at=5)
    watermark.split(50)
    watermark.update(drawn(150, batch=7))
    watermark.update(drawn(200, batch=7))
    watermark.live_read_ended(None, now=1.0)
    assert watermark.live_to_read == IdRange(100, None, OpenWriters(150, (7,)))
    assert watermark.to_read == IdRange(5, 50)
    watermark.join()
    assert watermark.to_read == IdRange(5)


@pytest.mark.parametrize(
    ("transaction_id", "next_id", "full"),
    [
        (7, 9, 7),
        (9, 9, 9),
        (11, 9, 11),
        (2**32 - 1, 2**32 + 3, 2**32 - 1),
        (3, 2**32 - 2, 2**32 + 3),
        (5, 3 * 2**32 + 9, 3 * 2**32 + 5),
    ],
)
def test_a_transaction_id_gets_the_epoch_that_it_is_of(transaction_id: int, next_id: int, full: int) -> None:
    assert with_epoch(transaction_id, next_id) == full
