"""What a harvester reports of one shard: its heartbeats, its rate, and its trouble. No I/O, and no clock of its own."""

from __future__ import annotations

from dataclasses import replace

from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat, Phase
from outbox_plugin.relay.events import (
    HarvestEvent,
    KeysHeld,
    KeysSummarised,
    LiveRowsJoined,
    LiveRowsLeftOut,
    RecordsIgnored,
    ShardStepped,
    TermBegan,
    WindowPublished,
)

WAITING_INTERVAL = 1.0  # Seconds between heartbeats of a harvester that follows and has trouble.
HELD_SHOWN_SECONDS = 1.0  # A key that is held back again at once is shown without a gap.
IGNORED_SHOWN_SECONDS = 60.0
STEP_EVENT_SECONDS = 0.5
_LONG_AGO = -1e9


class ShardReport:
    """Collects what happens, and says when a heartbeat is due and what is in it.

    `now` is in seconds of the relay's clock.
    """

    def __init__(self, template: LeaderHeartbeat, heartbeat_interval: float, note: str | None = None) -> None:
        """Nothing has happened.

        Args:
            template: a heartbeat that names the shard, the harvester and the outbox.
            heartbeat_interval: the seconds between a leader's heartbeats.
            note: a lasting warning, shown where there is no other trouble.
        """
        self.trouble: str | None = None  # What ended the last term, until things go well again.
        self.long_wait: str | None = None  # What the present term has waited for for long.
        self._last = template
        self._interval = heartbeat_interval
        self._note = note
        self._published = 0
        self._recovered = 0
        self._live_first = False  # Whether new rows go before a backlog,
        self._live_rows_waiting = 0  # and how many of them wait for it.
        self._rated = 0.0, 0  # When the rate was last computed, and what was published by then.
        self._held = "", 0.0  # Which key was held back last, and until when that is shown.
        self._ignored = "", 0.0  # Which records were ignored last, and until when that is shown.
        self._heartbeat_at = self._step_event_at = _LONG_AGO

    def observe(self, event: HarvestEvent, now: float) -> None:
        """Take in what happened in a term."""
        if isinstance(event, WindowPublished):
            self._published += event.rows
            self.trouble = None
        elif isinstance(event, KeysHeld):
            self._held = event.message(event.keys[0]), now + event.seconds + HELD_SHOWN_SECONDS
        elif isinstance(event, RecordsIgnored):
            self._ignored = event.message(), now + IGNORED_SHOWN_SECONDS
        elif isinstance(event, LiveRowsLeftOut):
            self._live_rows_waiting = event.waiting
        elif isinstance(event, KeysSummarised) and event.error is None:
            self._live_first, self._live_rows_waiting = True, 0
        elif isinstance(event, LiveRowsJoined):
            self._live_first, self._live_rows_waiting = False, 0
        elif isinstance(event, TermBegan):
            self._recovered = event.recovered
            self._live_first, self._live_rows_waiting = False, 0

    def term_began(self, leader_id: str, since: str) -> None:
        """A term has begun, `since` a time in ISO 8601: its first heartbeat is due at once."""
        self._last = replace(self._last, leader_id=leader_id, since=since)
        self._heartbeat_at = _LONG_AGO

    def heartbeat(
        self,
        now: float,
        phase: Phase,
        *,
        leads: bool,
        expects_its_own: bool,
        stalled: bool = False,
        can_replace: str | None = None,
        owns: bool = False,
    ) -> LeaderHeartbeat | None:
        """The heartbeat that is due now; None where none is.

        Args:
            now: the time.
            phase: the shard's phase in this harvester.
            leads: whether a term of this harvester is at work: a change of its phase, or of `stalled`, is told at once.
            expects_its_own: whether the harvester waits for heartbeats of its own, as proof of its way to Kafka.
            stalled: whether the term waits for Kafka longer than usual.
            can_replace: the leader id of another's term that this harvester can replace. It is told at once.
            owns: whether it can do so because it owns the shard's partition.
        """
        often = leads or expects_its_own
        due = now - self._heartbeat_at >= (self._interval if often else WAITING_INTERVAL)
        is_news = (leads and (phase, stalled) != (self._last.phase, self._last.stalled)) or (
            can_replace is not None and can_replace != self._last.can_replace
        )
        if not (due or is_news) or not (often or self.trouble or can_replace):
            return None
        self._heartbeat_at = now
        self._last = replace(
            self._last,
            phase=phase,
            published=self._published,
            records_per_second=self._rate(now),
            trouble=self._shown_trouble(now),
            recovered=self._recovered,
            live_first=self._live_first,
            live_rows_waiting=self._live_rows_waiting,
            stalled=stalled,
            can_replace=can_replace or "",
            owns=owns,
        )
        return self._last

    @property
    def instance(self) -> str:
        """The harvester's own name."""
        return self._last.instance

    def resignation(self, successor: str = "") -> LeaderHeartbeat:
        """The heartbeat with which the harvester gives the shard away, perhaps to the instance `successor`."""
        return replace(self._last, phase="resigned", trouble=self.trouble, successor=successor)

    def step_event(self, now: float, phase: Phase, leader_heard_at: float | None) -> ShardStepped | None:
        """The event for observers that is due now; None where none is.

        Args:
            now: seconds of the relay's clock.
            phase: the harvester's part in the shard: candidate, leader, resigned or waiting.
            leader_heard_at: when the last heartbeat of a leader was received; None before the first.
        """
        if now - self._step_event_at < STEP_EVENT_SECONDS:
            return None
        self._step_event_at = now
        return ShardStepped(self._last.shard, phase, leader_heard_at, self._shown_trouble(now))

    def _shown_trouble(self, now: float) -> str | None:
        passing = _still_shown(self._held, now) or _still_shown(self._ignored, now)
        return self.trouble or "; ".join(filter(None, [self.long_wait, passing])) or self._note

    def _rate(self, now: float) -> float:
        """Records per second since about a second ago."""
        at, published = self._rated
        if now - at < 1.0:
            return self._last.records_per_second
        self._rated = now, self._published
        return round((self._published - published) / (now - at), 1) if at else 0.0


def _still_shown(notice: tuple[str, float], now: float) -> str | None:
    text, until = notice
    return text if now < until else None
