"""The times of a job that replays events are in UTC, as those of the command, wherever the code location runs."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from outbox_plugin.dagster import jobs

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize("text", ["2026-01-31T12:00", "2026-01-31T12:00+00:00", "2026-01-31T07:00-05:00"])
def test_a_time_is_in_utc_unless_it_has_an_offset(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert jobs._time("since", text) == NOON
    finally:
        monkeypatch.undo()
        time.tzset()
