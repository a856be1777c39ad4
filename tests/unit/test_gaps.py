"""The longest time without records is found, and the faults that explain it."""

from __future__ import annotations

from outbox_plugin.bench.gaps import Injected, explain_longest_gap

KILL = Injected("kill", "kill harvester 0", 9.0, 9.0)
PAUSE = Injected("pause", "pause harvester 1 for 2.0 s", 1.0, 3.0)
BROKER = Injected("broker", "Kafka node 2 killed", 11.0, 20.0)
LATER = Injected("network held", "network held", 13.5, 30.0)


def test_it_names_what_was_active_or_had_just_ended() -> None:
    gap = explain_longest_gap([8.0, 9.0, 9.5, 13.0, 13.2], [PAUSE, KILL, BROKER, LATER])
    assert (gap.began, gap.seconds) == (9.5, 3.5)
    assert gap.faults == (KILL, BROKER)
    assert str(gap) == (
        "longest time without records 3.50 s, from 9.5 s on; faults then: kill harvester 0 (9.0 to 9.0 s); "
        "Kafka node 2 killed (11.0 to 20.0 s)"
    )


def test_without_a_fault_it_says_so() -> None:
    assert str(explain_longest_gap([1.0, 2.0], [])).endswith("faults then: none")


def test_nothing_arrived() -> None:
    assert explain_longest_gap([], [KILL]).seconds == 0.0
