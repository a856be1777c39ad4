"""The floor: how far it may rise, and how rows below it are found all the same."""

from __future__ import annotations

from outbox_plugin.core.floor import BEGINNING, SWEEP_REST, SWEEP_SECONDS, Drawn, Floor


def settled_at(last_id: int, *, floor_at: int) -> Floor:
    """A floor that stands at `floor_at`, with ids drawn up to `last_id`, and a sweep just done."""
    floor = Floor()
    floor.learned(Drawn(last_id, frozenset()))
    floor.read(BEGINNING, floor.settled, floor_at, began=0.0, now=0.0)
    assert floor.start_of_read(0.0) == floor_at
    return floor


def test_it_rises_to_what_was_read_and_no_further() -> None:
    assert settled_at(9, floor_at=5).start_of_read(1.0) == 5


def test_it_waits_for_everybody_who_may_have_drawn_a_lower_id() -> None:
    floor = Floor()
    floor.learned(Drawn(9, frozenset({"a", "b"})))
    floor.learned(Drawn(12, frozenset({"b"})))
    assert floor.settled == 0
    floor.learned(Drawn(15, frozenset({"c"})))
    assert floor.settled == 9


def test_a_prepared_transaction_holds_it_where_it_is() -> None:
    floor = Floor()
    floor.learned(Drawn(9, frozenset({"3/1"})))
    floor.learned(Drawn(9, frozenset({"-1/7"})))
    assert floor.settled == 0


def test_a_sweep_finds_ids_of_any_sign() -> None:
    assert settled_at(9, floor_at=9).start_of_read(SWEEP_SECONDS) == BEGINNING


def test_a_sweep_that_finds_rows_goes_on_behind_them() -> None:
    floor = settled_at(1_000, floor_at=1_000)
    floor.read(BEGINNING, floor.settled, 300, began=30.0, now=30.0)
    assert floor.start_of_read(30.0) == 300
    floor.read(300, floor.settled, None, began=30.0, now=30.0)
    assert floor.start_of_read(30.0) == 1_000
    assert floor.start_of_read(30.0 + SWEEP_SECONDS) == BEGINNING


def test_sweeps_that_take_long_come_seldom() -> None:
    floor = settled_at(9, floor_at=9)
    floor.read(BEGINNING, floor.settled, None, began=30.0, now=32.0)
    assert floor.start_of_read(32.0 + SWEEP_SECONDS) == BEGINNING  # The first may have been held up by chance.
    floor.read(BEGINNING, floor.settled, None, began=62.0, now=65.0)
    assert floor.start_of_read(65.0 + 2.0 * SWEEP_REST - 1.0) == 9
    assert floor.start_of_read(65.0 + 2.0 * SWEEP_REST) == BEGINNING


def test_it_falls_when_ids_are_drawn_from_the_start_again() -> None:
    floor = settled_at(9, floor_at=9)
    floor.learned(Drawn(3, frozenset({"a"})))
    assert (floor.settled, floor.start_of_read(1.0)) == (0, BEGINNING)
