"""The watermark: how far it may rise, and how rows below it are found all the same."""

from __future__ import annotations

from outbox_plugin.core.low_watermark import (
    BEGINNING,
    SWEEP_BUSY_SECONDS,
    SWEEP_IDS,
    SWEEP_REST,
    SWEEP_SECONDS,
    IdRange,
    LowWatermark,
    SequenceState,
)


def settled_at(last_id: int, *, at: int) -> LowWatermark:
    """A watermark that stands at `at`, with ids drawn up to `last_id`; all below it was walked at the time 0."""
    watermark = LowWatermark()
    watermark.update(SequenceState(last_id, frozenset()))
    watermark.read_ended(at, now=0.0)
    assert watermark.to_read == IdRange(at)
    return watermark


def due(watermark: LowWatermark, now: float, *, busy: bool = False) -> IdRange:
    slice_ = watermark.slice_due(now, busy=busy)
    assert slice_ is not None
    return slice_


def sweep(watermark: LowWatermark, began: float, seconds: float) -> None:
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
    watermark = LowWatermark()
    watermark.update(SequenceState(9, frozenset({"a", "b"})))
    watermark.update(SequenceState(12, frozenset({"b"})))
    watermark.read_ended(12, now=0.0)
    assert watermark.to_read == IdRange(0)
    watermark.update(SequenceState(15, frozenset({"c"})))
    watermark.read_ended(12, now=0.0)
    assert watermark.to_read == IdRange(9)


def test_a_prepared_transaction_holds_it_where_it_is() -> None:
    watermark = LowWatermark()
    watermark.update(SequenceState(9, frozenset({"3/1"})))
    watermark.update(SequenceState(9, frozenset({"-1/7"})))
    watermark.read_ended(None, now=0.0)
    assert watermark.to_read == IdRange(0)


def test_before_the_first_read_all_is_read_and_nothing_swept() -> None:
    watermark = LowWatermark()
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
