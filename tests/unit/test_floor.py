"""The floor: how far it may rise, and how rows below it are found all the same."""

from __future__ import annotations

from outbox_plugin.core.floor import (
    BEGINNING,
    SWEEP_BUSY_SECONDS,
    SWEEP_IDS,
    SWEEP_REST,
    SWEEP_SECONDS,
    Drawn,
    Floor,
    Span,
)


def settled_at(last_id: int, *, floor_at: int) -> Floor:
    """A floor that stands at `floor_at`, with ids drawn up to `last_id`; all below it was walked at the time 0."""
    floor = Floor()
    floor.learned(Drawn(last_id, frozenset()))
    floor.read(floor_at, now=0.0)
    assert floor.span == Span(floor_at)
    return floor


def due(floor: Floor, now: float, *, busy: bool = False) -> Span:
    slice_ = floor.slice_due(now, busy=busy)
    assert slice_ is not None
    return slice_


def sweep(floor: Floor, began: float, seconds: float) -> None:
    """All of a sweep that is due; it finds nothing, and its first slice takes so long."""
    ends = began + seconds
    while (slice_ := floor.slice_due(began, busy=False)) is not None:
        floor.swept(slice_, None, began, ends)
        began = ends


def test_it_rises_to_what_was_read_and_no_further() -> None:
    floor = settled_at(9, floor_at=5)
    floor.read(7, now=1.0)
    assert floor.span == Span(7)


def test_it_waits_for_everybody_who_may_have_drawn_a_lower_id() -> None:
    floor = Floor()
    floor.learned(Drawn(9, frozenset({"a", "b"})))
    floor.learned(Drawn(12, frozenset({"b"})))
    floor.read(12, now=0.0)
    assert floor.span == Span(0)
    floor.learned(Drawn(15, frozenset({"c"})))
    floor.read(12, now=0.0)
    assert floor.span == Span(9)


def test_a_prepared_transaction_holds_it_where_it_is() -> None:
    floor = Floor()
    floor.learned(Drawn(9, frozenset({"3/1"})))
    floor.learned(Drawn(9, frozenset({"-1/7"})))
    floor.read(None, now=0.0)
    assert floor.span == Span(0)


def test_before_the_first_read_all_is_read_and_nothing_swept() -> None:
    floor = Floor()
    assert floor.span == Span(BEGINNING)
    assert floor.slice_due(1e9, busy=False) is None


def test_a_sweep_finds_ids_of_any_sign() -> None:
    floor = settled_at(9, floor_at=9)
    assert floor.slice_due(SWEEP_SECONDS - 1, busy=False) is None
    assert due(floor, SWEEP_SECONDS) == Span(BEGINNING, 9)


def test_what_was_deleted_since_the_last_sweep_is_swept_in_slices() -> None:
    """And what is deleted meanwhile too; reads go on from the floor between them."""
    floor = settled_at(10 * SWEEP_IDS, floor_at=9)
    floor.read(9 + SWEEP_IDS, now=1.0)
    slices = []
    while (slice_ := floor.slice_due(SWEEP_SECONDS, busy=False)) is not None:
        floor.swept(slice_, None, SWEEP_SECONDS, SWEEP_SECONDS)
        slices.append(slice_)
        if len(slices) == 1:
            floor.read(10 + SWEEP_IDS, now=SWEEP_SECONDS)
        assert floor.span == Span(10 + SWEEP_IDS)
    assert slices == [Span(BEGINNING, 9), Span(9, 9 + SWEEP_IDS), Span(9 + SWEEP_IDS, 10 + SWEEP_IDS)]
    assert not floor.sweeping
    assert due(floor, 2 * SWEEP_SECONDS) == Span(BEGINNING, 10 + SWEEP_IDS)


def test_a_sweep_that_finds_rows_goes_on_behind_them() -> None:
    floor = settled_at(1_000, floor_at=1_000)
    floor.swept(due(floor, 30.0), 300, began=30.0, now=30.0)
    assert floor.sweeping
    assert due(floor, 30.0) == Span(300, 1_000)
    floor.swept(Span(300, 1_000), None, began=30.0, now=30.0)
    assert floor.slice_due(30.0, busy=False) is None
    assert due(floor, 30.0 + SWEEP_SECONDS) == Span(BEGINNING, 1_000)


def test_while_rows_come_in_masses_a_sweep_waits_but_not_for_ever() -> None:
    floor = settled_at(9, floor_at=9)
    assert floor.slice_due(SWEEP_SECONDS + SWEEP_BUSY_SECONDS - 1, busy=True) is None
    assert due(floor, SWEEP_SECONDS + SWEEP_BUSY_SECONDS, busy=True) == Span(BEGINNING, 9)


def test_sweeps_that_take_long_come_seldom() -> None:
    floor = settled_at(9, floor_at=9)
    sweep(floor, 30.0, seconds=2.0)
    assert due(floor, 32.0 + SWEEP_SECONDS)  # The first may have been held up by chance.
    sweep(floor, 62.0, seconds=3.0)
    assert floor.slice_due(65.0 + 2.0 * SWEEP_REST - 1.0, busy=False) is None
    assert due(floor, 65.0 + 2.0 * SWEEP_REST)


def test_it_falls_when_ids_are_drawn_from_the_start_again() -> None:
    floor = settled_at(9, floor_at=9)
    assert due(floor, SWEEP_SECONDS)
    floor.learned(Drawn(3, frozenset({"a"})))
    assert floor.span == Span(BEGINNING)
    assert not floor.sweeping
