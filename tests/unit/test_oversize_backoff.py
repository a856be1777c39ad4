"""How long the rows wait of which each may cost a transaction."""

from __future__ import annotations

from outbox_plugin.core.oversize_backoff import OversizeBackoff

TRANSACTION_SECONDS = 0.2


def test_most_of_the_time_is_left_to_other_rows_however_many_windows_wait() -> None:
    for windows in (1, 3, 50):
        backoff, now, busy = OversizeBackoff(), 0.0, 0.0
        due = [0.0] * windows
        while now < 600:
            first = min(range(windows), key=due.__getitem__)
            now = max(now, due[first]) + TRANSACTION_SECONDS
            busy += TRANSACTION_SECONDS
            due[first] = now + backoff.next_delay(now)
        assert 0.1 < busy / now < 0.3, windows


def test_a_delay_is_never_longer_than_a_minute() -> None:
    backoff = OversizeBackoff()
    assert max(backoff.next_delay(second / 10) for second in range(36_000)) == 60
