"""What a sensor's tick remembers, and what it tells of what has changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outbox_plugin.dagster.cursor import Cursor, Moved, Use
from outbox_plugin.status.reader import Leader, ShardStatus, Status


def led_by(*terms: str | None, recovered: int = 0) -> Status:
    shards = [
        ShardStatus(
            number, Leader("i", "h", 1, term, "") if term else None, 0, 0.0, 0, None, None, recovered_rows=recovered
        )
        for number, term in enumerate(terms)
    ]
    return Status(0, None, tuple(shards), ())


def test_it_comes_back_as_it_was_written() -> None:
    cursor = Cursor(1.5, {"0": "a"}, 2, 3.0, {"t": 4}, ("t",), 5, 6.0, 7)
    assert Cursor.parse(cursor.encode()) == cursor


@pytest.mark.parametrize("text", [None, "", "{}", "[]", "nonsense", '{"moving": [], "of_another_version": 1}'])
def test_anything_else_is_an_empty_one(text: str | None) -> None:
    assert Cursor.parse(text) == Cursor()


def test_a_takeover_is_a_term_that_follows_another() -> None:
    cursor = Cursor()
    for terms in (("a", None), ("a", "x"), (None, "x"), ("b", "x"), ("b", "y")):
        cursor = cursor.after(led_by(*terms), 1.0, troubled=False)
    assert cursor.takeovers == 2


def test_what_a_new_term_did_not_repeat_is_counted_once() -> None:
    cursor = Cursor()
    for term, recovered in (("a", 3), ("a", 3), (None, 0), ("a", 3), ("b", 4)):
        cursor = cursor.after(led_by(term, recovered=recovered), 1.0, troubled=False)
    assert cursor.recovered_rows == 7


def test_trouble_has_a_beginning_and_an_end() -> None:
    began = Cursor().after(led_by(None), 10.0, troubled=True)
    assert began.after(led_by(None), 20.0, troubled=True).troubled_since == 10.0
    assert began.after(led_by("a"), 20.0, troubled=False).troubled_since == 0.0


def test_a_topic_is_told_of_while_it_moves_and_once_when_it_stops() -> None:
    def tick(cursor: Cursor, end: int, now: float) -> tuple[Cursor, dict[str, Moved]]:
        cursor, told = cursor.moved({"t": end}, now)
        return replace(cursor, at=now), told

    cursor, first = tick(Cursor(), 100, 0.0)
    assert first == {"t": Moved(100, 0, 0.0)}
    cursor, still = tick(cursor, 100, 10.0)
    assert still == {}
    cursor, moving = tick(cursor, 150, 20.0)
    assert moving == {"t": Moved(150, 50, 5.0)}
    cursor, stopped = tick(cursor, 150, 30.0)
    assert stopped == {"t": Moved(150, 0, 0.0)}
    cursor, anew = tick(cursor, 20, 40.0)
    assert anew == {"t": Moved(20, 20, 2.0)}


def test_a_topic_that_was_not_heard_of_is_not_forgotten() -> None:
    cursor, _ = Cursor().moved({"t": 7}, 1.0)
    cursor, told = cursor.moved({}, 2.0)
    assert (cursor.offsets, told) == ({"t": 7}, {})


def test_cpu_is_of_one_process_since_the_last_tick() -> None:
    cursor, percent = Cursor(at=90.0).used(Use(1, 4.0, 1000), 100.0)
    assert percent is None
    cursor, percent = replace(cursor, at=100.0).used(Use(1, 5.0, 1000), 110.0)
    assert percent == pytest.approx(10.0)
    cursor, percent = cursor.used(Use(2, 0.1, 1000), 120.0)
    assert percent is None
    assert cursor.used(None, 130.0)[0].pid == 0
