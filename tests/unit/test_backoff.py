"""How long to wait before the next try."""

from __future__ import annotations

from outbox_plugin.core.backoff import Backoff


def test_waits_double_up_to_the_last_and_start_again_after_a_success() -> None:
    pace = Backoff(1.0, 4.0)
    assert [pace.wait() for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    pace.succeeded()
    assert pace.wait() == 1.0


def test_jitter_takes_away_up_to_half() -> None:
    assert Backoff(2.0, 4.0).wait(jitter=1.0) == 1.0
    assert Backoff(2.0, 4.0).wait(jitter=0.5) == 1.5
