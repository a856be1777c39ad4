"""How a term rests while no rows come: it looks again and again, or sleeps until a writer wakes it."""

from __future__ import annotations

from outbox_plugin.core.pace import (
    CONTROL_ASLEEP_SECONDS,
    CONTROL_BUSY_SECONDS,
    CONTROL_IDLE_SECONDS,
    HIDDEN_SECONDS,
    IDLE_FIRST,
    IDLE_LAST,
    READ_ASLEEP_SECONDS,
    SLEEP_AFTER_SECONDS,
    STEADY_SECONDS,
    Backoff,
)
from outbox_plugin.core.ports import WakeUp
from outbox_plugin.relay.stages import Stages


class Rest:
    """Belongs to the stage of a term that looks for rows; but for `interrupt`, it is called by its thread alone."""

    def __init__(self, stages: Stages, wake_up: WakeUp | None) -> None:
        self._stages = stages
        self._wake_up = wake_up
        self._pause = Backoff(IDLE_FIRST, IDLE_LAST)
        self._rows_at = stages.runtime.now()
        self._controlled_at: float | None = None
        self._asleep = False

    def control_is_due(self, now: float) -> bool:
        """Whether the database is to be asked for orders now; if so, that is taken as done."""
        idle = now - self._rows_at > CONTROL_IDLE_SECONDS
        pace = CONTROL_ASLEEP_SECONDS if self._asleep else CONTROL_IDLE_SECONDS if idle else CONTROL_BUSY_SECONDS
        due = self._controlled_at is None or now - self._controlled_at >= pace
        if due:
            self._controlled_at = now
        return due

    def rows_came(self, now: float) -> None:
        """A look at `now` found rows."""
        self._pause.succeeded()
        self._rise(now)

    def take(self, now: float, *, paused: bool, hidden: bool) -> None:
        """A look at `now` found nothing, or was spared for `hidden` rows: wait until it is worth while again."""
        if paused:
            self._stages.rest(IDLE_LAST)
        elif now - self._rows_at < STEADY_SECONDS:
            self._stages.rest(IDLE_FIRST)
        elif self._wake_up is None or now - self._rows_at < SLEEP_AFTER_SECONDS:
            self._stages.rest(HIDDEN_SECONDS if hidden else self._pause.wait())
        else:
            self._sleep(self._wake_up)

    def interrupt(self) -> None:
        """The term is to end: end a sleep."""
        if self._wake_up is not None:
            self._wake_up.interrupt()

    def _sleep(self, wake_up: WakeUp) -> None:
        """Let writers wake us. The first time, only ask them to: what was written before they knew is to be read."""
        if not self._asleep:
            self._asleep = wake_up.asleep()
            if not self._asleep:
                self._stages.rest(self._pause.wait())
        elif wake_up.wait(READ_ASLEEP_SECONDS):
            self._controlled_at = None  # Perhaps it was an order.
            self._rise(self._stages.runtime.now())

    def _rise(self, now: float) -> None:
        self._rows_at = now
        if self._asleep and self._wake_up is not None:
            self._asleep = False
            self._wake_up.awake()
