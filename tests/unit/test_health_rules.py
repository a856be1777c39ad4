"""What the checks say of a status, and from when on it is an error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outbox_plugin.errors import InvalidSetting
from outbox_plugin.status.health_rules import Limits, dead_letters, health, undrained
from outbox_plugin.status.reader import Leader, ShardStatus, Status

LEADER = Leader("instance", "host", 1, "term", "2026-01-01T00:00:00+00:00")
LIMITS = Limits(lag_warn_seconds=30, lag_error_seconds=300, dead_letters_error=10)


def status(
    *, lag: float = 0.0, led: bool = True, trouble: str | None = None, errors: tuple[str, ...] = (), shards: int = 1
) -> Status:
    shard = [ShardStatus(n, LEADER if led else None, 0, 0.0, 0, None, trouble) for n in range(shards)]
    return Status(1, lag, tuple(shard), errors)


@pytest.mark.parametrize("seconds", [300.5, float("nan")])
def test_a_warning_comes_before_an_error(seconds: float) -> None:
    with pytest.raises(InvalidSetting, match=r"^lag_warn_seconds: expected 300, which .* \(given: (300\.5|nan)\)$"):
        Limits(lag_warn_seconds=seconds)


def test_all_is_well() -> None:
    judged = health(status(), LIMITS)
    assert (judged.passed, judged.severe, judged.what_to_do) == (True, False, "")


@pytest.mark.parametrize(
    ("lag", "passed", "severe"), [(0, True, False), (30, True, False), (31, False, False), (301, False, True)]
)
def test_a_lag_warns_first_and_is_an_error_later(lag: float, passed: bool, severe: bool) -> None:
    judged = health(status(lag=lag), LIMITS)
    assert (judged.passed, judged.severe) == (passed, severe)
    assert passed or f"waited for {lag:.0f} s" in judged.explanation


@pytest.mark.parametrize(("lasted", "severe"), [(0, False), (300, False), (301, True)])
def test_trouble_that_lasts_is_an_error(lasted: float, severe: bool) -> None:
    judged = health(status(led=False), LIMITS, lasted)
    assert (judged.passed, judged.severe) == (False, severe)
    assert judged.explanation == "shard 0 has no leader"


@pytest.mark.parametrize(
    ("found", "advice"),
    [
        (status(errors=("Postgres did not answer in time",), led=False), "OUTBOX_DSN"),
        (status(errors=("Kafka did not answer in time",), led=False), "OUTBOX_BOOTSTRAP_SERVERS"),
        (status(errors=("Postgres, as …: permission denied for table outbox",), led=False), "`outbox grants"),
        (status(errors=('relation "outbox" does not exist; run `outbox migrate` first',), led=False), "the error says"),
        (status(trouble="a row is too large"), "reported trouble"),
        (status(led=False), "sensor is on"),
        (replace(status(lag=31), parked_keys=1), "`outbox parked list`"),
        (status(lag=31), "too slow"),
    ],
)
def test_each_failure_says_what_to_do(found: Status, advice: str) -> None:
    assert advice in health(found, LIMITS).what_to_do
    assert advice in undrained(3, 1.0, found).what_to_do


@pytest.mark.parametrize(
    ("letters", "parked", "severe"), [(0, 1, False), (1, 0, False), (9, 0, False), (9, 1, True), (10, 0, True)]
)
def test_dead_letters_warn_and_many_are_an_error(letters: int, parked: int, severe: bool) -> None:
    judged = dead_letters(replace(status(), dead_letters=letters, parked_keys=parked), LIMITS)
    assert (judged.passed, judged.severe) == (False, severe)
    assert judged.what_to_do


def test_no_dead_letters_pass() -> None:
    assert dead_letters(status(), LIMITS).passed


def test_it_is_not_known_whether_there_are_dead_letters_while_postgres_is_away() -> None:
    judged = dead_letters(Status(None, None, (), ("Postgres did not answer in time",)), LIMITS)
    assert (judged.passed, judged.severe, judged.explanation) == (False, False, "Postgres did not answer in time")
    assert "OUTBOX_DSN" in judged.what_to_do


def test_a_pause_is_said_with_how_it_ends() -> None:
    paused = status()
    judged = health(replace(paused, shards=(replace(paused.shards[0], paused=True),)), LIMITS)
    assert (judged.passed, judged.severe, judged.explanation) == (False, False, "shard 0 is paused")
    assert "outbox_resume" in judged.what_to_do


def test_what_does_not_drain_because_it_is_paused_is_not_called_slow() -> None:
    paused = status()
    judged = undrained(5, 1.0, replace(paused, shards=(replace(paused.shards[0], paused=True),)))
    assert judged.explanation == "5 events still wait after 1 s: shard 0 is paused"


def test_what_does_not_drain_because_its_keys_are_parked_is_not_called_slow() -> None:
    judged = undrained(5, 1.0, replace(status(), parked_keys=2))
    assert judged.explanation == "5 events still wait after 1 s: 2 keys wait behind a row that Kafka refused"
