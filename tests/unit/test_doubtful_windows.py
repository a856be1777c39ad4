"""How long the rows wait of which each may cost a transaction."""

from __future__ import annotations

from outbox_plugin.core.doubtful_windows import DoubtfulWindows

TRANSACTION_SECONDS = 0.2


def test_most_of_the_time_is_left_to_other_rows_however_many_windows_are_doubtful() -> None:
    for windows in (1, 3, 50):
        doubtful, now, busy = DoubtfulWindows(), 0.0, 0.0
        due = [0.0] * windows
        while now < 600:
            first = min(range(windows), key=due.__getitem__)
            now = max(now, due[first]) + TRANSACTION_SECONDS
            busy += TRANSACTION_SECONDS
            due[first] = now + doubtful.hold(now)
        assert 0.1 < busy / now < 0.3, windows


def test_no_row_waits_for_more_than_a_minute_at_a_time() -> None:
    doubtful = DoubtfulWindows()
    assert max(doubtful.hold(second / 10) for second in range(36_000)) == 60
