"""When a server that owes an answer is given up: the table at the head of `silence`, row by row."""

from __future__ import annotations

from outbox_plugin.schema.silent_server import ProbeAction, ProbeResult, Silence


def ticked(silence: Silence, first: float, last: float) -> list[ProbeAction]:
    """What is said at every tenth of a second from `first` to `last`."""
    return [silence.tick(number / 10) for number in range(round(first * 10), round(last * 10) + 1)]


def probing() -> Silence:
    """A silence that began at 10.0, and whose probe began at 10.5."""
    silence = Silence(10.0)
    assert ticked(silence, 10.0, 10.5)[-1] is ProbeAction.PROBE
    return silence


def test_a_short_silence_is_nothing() -> None:
    assert {*ticked(Silence(10.0), 10.0, 10.4)} == {ProbeAction.WAIT}


def test_a_longer_one_asks_for_one_probe() -> None:
    assert ticked(Silence(10.0), 10.0, 11.0).count(ProbeAction.PROBE) == 1


def test_a_probe_that_is_not_answered_in_time_ends_it() -> None:
    silence = probing()
    assert {*ticked(silence, 10.6, 11.9)} == {ProbeAction.WAIT}
    assert silence.tick(12.0) is ProbeAction.GIVE_UP


def test_a_server_that_works_is_waited_for_without_end() -> None:
    silence = Silence(0.0)
    for tenth in range(6_000):
        action = silence.tick(tenth / 10)
        assert action is not ProbeAction.GIVE_UP
        if action is ProbeAction.PROBE:
            silence.report(ProbeResult.WORKING, tenth / 10 + 0.01)


def test_a_server_that_works_is_asked_again() -> None:
    silence = probing()
    silence.report(ProbeResult.WORKING, 10.6)
    assert {*ticked(silence, 10.6, 11.5)} == {ProbeAction.WAIT}
    assert silence.tick(11.6) is ProbeAction.PROBE


def test_a_server_that_does_not_work_on_the_statement_may_have_answered_just_now() -> None:
    silence = probing()
    silence.report(ProbeResult.LOST, 10.6)
    assert {*ticked(silence, 10.6, 11.0)} == {ProbeAction.WAIT}
    assert silence.tick(11.1) is ProbeAction.GIVE_UP


def test_who_was_stopped_does_not_blame_the_server() -> None:
    silence = probing()
    assert silence.tick(60.0) is ProbeAction.WAIT
    assert silence.tick(60.5) is ProbeAction.PROBE
