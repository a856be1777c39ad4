"""What is kept beside the log, and the time of what is known: each position has a time of its own."""

from __future__ import annotations

from outbox_plugin.coordination.log_view import LogView
from outbox_plugin.coordination.messages import ClaimingPartition, Heartbeat, ReleaseGroup, ReleasingPartition
from outbox_plugin.coordination.partition_owners import NO_END, Key
from outbox_plugin.coordination.state_topic import KeptPosition, KeptState

BILLING, OTHERS = Key("billing", "orders", 0), Key("others", "orders", 0)
PAUSE = ReleaseGroup(0, 50, "run-9", "operator", "billing", "", 0, NO_END)


def kept(*positions: tuple[Key, float]) -> KeptState:
    return KeptState({key: KeptPosition(7, at, ("id-1",)) for key, at in positions}, {"billing": PAUSE})


def test_a_position_that_was_kept_by_a_clock_ahead_makes_no_other_one_later() -> None:
    """Else its group's own instances could not write past it until their clock is there."""
    view = LogView(range(8), 10, width=8, since=0)
    view.begin_with(kept((BILLING, 60.0), (OTHERS, 10_000.0)))
    view.note_time(view.coordination_partition("orders"), 70.0)
    view.note_time((view.coordination_partition("orders") + 1) % 8, 90.0)
    assert [view.time_of(key) for key in (BILLING, OTHERS)] == [70.0, 10_000.0]


def test_a_group_begins_with_what_is_its_own() -> None:
    everything = kept((BILLING, 60.0), (BILLING._replace(topic="bills"), 60.0), (OTHERS, 60.0))
    assert everything.of("billing", ["orders"]) == kept((BILLING, 60.0))
    assert everything.of("others", ["orders"]) == KeptState({OTHERS: KeptPosition(7, 60.0, ("id-1",))})
    view = LogView(range(8), 10, width=8, since=0)
    view.begin_with(everything)
    view.caught_up()
    assert all(world.paused("billing", 1_000) and not world.paused("others", 1_000) for world in view.worlds.values())


def test_a_pause_that_the_log_still_has_counts_from_there_on() -> None:
    """What was claimed before it counts, and so does its holder's last word, which may set the position back."""
    me = (0, 0, "run-1", "a", *BILLING)
    view = LogView([0], 10, width=1, since=0)
    view.begin_with(kept((BILLING, 40.0)))
    for at, message in (
        (30.0, ClaimingPartition(*me)),
        (31.0, Heartbeat(*me, 7)),
        (50.4, PAUSE),
        (51.0, ReleasingPartition(*me, 5)),
    ):
        view.worlds[0].apply(message, at)
    view.caught_up()
    assert view.worlds[0].offset(*BILLING) == 5
    assert view.worlds[0].paused("billing", 1_000)
