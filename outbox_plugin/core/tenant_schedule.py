"""Which tenants' harvesters to start and to stop, as tenants come, go and fail. No I/O, no clock.

A tenant is known by its schema.

    what is known of the tenant                        what happens
    found, for the first time                          it is started, before those that have failed
    found, and its harvester fails                     it is started again after a wait
    found, and must not be harvested                   it is refused: its harvester is stopped, and it is not started
    refused, and may be harvested by now               it is started
    found, and at rest (`core.resting_tenants`)        its harvester is stopped, and it is not started
    found, and all places are taken                    it waits for a place
    running, and others wait for a place               after its turn it is stopped, and waits behind them
    no longer found                                    its harvester is stopped, and it is forgotten

The wait doubles each time that a harvester fails soon after its start, until one has run well: for long, or until its
tenant came to rest. Of the tenants that may be started, those that were never started come first, then the one that has
waited longest. So however many tenants are broken, each other one is started as soon as there is room. A refusal needs
no room.

Where tenants rest, only so many run at once (`places`): a process that wakes hundreds at the same time would be too
busy to keep one of them alive. Those that wait take turns with those that run, so that each one is served.

Why a tenant is not harvested is worth a line of the log when it happens first, when the reason changes, and then once
in `LOG_AGAIN_SECONDS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from heapq import nsmallest

from outbox_plugin.core.backoff import Backoff

RETRY_FIRST, RETRY_LAST = 5.0, 60.0  # Seconds.
WELL_SECONDS = 300.0  # A harvester that has run for so long did not fail for what made the last one fail.
LOG_AGAIN_SECONDS = 3600.0
TURN_SECONDS = 30.0  # How long a tenant runs at least before it makes place for one that waits.


@dataclass(slots=True)
class _Tenant:
    is_running: bool = False  # From the decision to start it to the end of its harvester.
    is_refused: bool = False
    is_resting: bool = False
    has_failed: bool = False  # Since it was last started.
    since: float = 0.0  # When it was last started.
    not_before: float = float("-inf")  # When it may be started again.
    backoff: Backoff = field(default_factory=lambda: Backoff(RETRY_FIRST, RETRY_LAST))
    logged: str | None = None  # The reason that the log has.
    logged_at: float = 0.0

    def is_news(self, reason: str, now: float) -> bool:
        """Whether the log should have the reason. If so, it counts as logged."""
        if reason == self.logged and now - self.logged_at < LOG_AGAIN_SECONDS:
            return False
        self.logged, self.logged_at = reason, now
        return True


@dataclass(frozen=True, slots=True)
class Changes:
    """The schemas for which something is to be done."""

    start: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()  # To be stopped, and named in the log with the reason.
    gone: tuple[str, ...] = ()  # To be stopped.
    rest: tuple[str, ...] = ()  # To be stopped.
    preempted: tuple[str, ...] = ()  # To be stopped, and started again later.


@dataclass(frozen=True, slots=True)
class TenantRestart:
    """A tenant that has failed is started again after so many seconds; `is_news` if the log should say why."""

    seconds: float
    is_news: bool


class TenantSchedule:
    """Decides for one process. `now` is in seconds of a monotonic clock."""

    def __init__(self) -> None:
        """No tenant is known yet."""
        self._tenants: dict[str, _Tenant] = {}
        self._waiting = 0
        self._is_crowded = False

    @property
    def waiting(self) -> int:
        """How many tenants might have been started at the last `changes`, and were not."""
        return self._waiting

    @property
    def is_crowded(self) -> bool:
        """Whether tenants waited for the places of others at the last `changes`, and not only for room to start."""
        return self._is_crowded

    @property
    def running(self) -> int:
        """How many tenants are harvested, or being started."""
        return sum(each.is_running for each in self._tenants.copy().values())

    @property
    def failed(self) -> tuple[str, ...]:
        """The tenants that are refused, or could not be harvested and wait to be started again."""
        each_one = self._tenants.copy().items()
        return tuple(schema for schema, each in each_one if each.is_refused or each.has_failed)

    def changes(
        self,
        found: Mapping[str, str | None],
        now: float,
        room: int,
        resting: Set[str] = frozenset(),
        places: int | None = None,
    ) -> Changes:
        """What to do now; what is returned counts as done.

        Args:
            found: the schemas that have outboxes, and why one must not be harvested, or None.
            now: the time.
            room: how many may be started now.
            resting: the tenants at rest.
            places: how many may run at once; None: all.
        """
        gone = tuple(schema for schema in self._tenants if schema not in found)
        for schema in gone:
            del self._tenants[schema]
        refused, due, rest = [], [], []
        for schema, reason in found.items():
            if reason is not None:
                if self._refuse(schema, reason, now):
                    refused.append(schema)
            elif schema in resting:
                if self._rest(schema):
                    rest.append(schema)
            else:
                self._admit(schema)
                if self._is_due(schema, now):
                    due.append(schema)
        free = len(due) if places is None else max(places - self.running, 0)
        start = tuple(nsmallest(min(room, free), due, key=self._due_since))
        for schema in start:
            tenant = self._tenants.setdefault(schema, _Tenant())
            tenant.is_running, tenant.has_failed, tenant.since = True, False, now
        self._waiting, self._is_crowded = len(due) - len(start), len(due) > free
        return Changes(start, tuple(refused), gone, tuple(rest), self._preempt(len(due) - free, now))

    def _preempt(self, wanted: int, now: float) -> tuple[str, ...]:
        """Stop tenants whose turns are over, those that run longest first, at most as many as are `wanted`."""
        over = [
            schema for schema, each in self._tenants.items() if each.is_running and now - each.since >= TURN_SECONDS
        ]
        preempted = tuple(nsmallest(max(wanted, 0), over, key=lambda schema: self._tenants[schema].since))
        for schema in preempted:
            tenant = self._tenants[schema]
            tenant.is_running, tenant.not_before = False, now
        return preempted

    def _refuse(self, schema: str, reason: str, now: float) -> bool:
        """Refuse a tenant. Returns whether that is news."""
        tenant = self._tenants.setdefault(schema, _Tenant())
        if not tenant.is_refused:
            tenant.is_refused, tenant.is_running, tenant.has_failed, tenant.logged = True, False, False, None
        tenant.is_resting = False
        return tenant.is_news(reason, now)

    def _rest(self, schema: str) -> bool:
        """Put a tenant to rest. Returns whether it was running."""
        tenant = self._tenants.setdefault(schema, _Tenant())
        was_running, tenant.is_running = tenant.is_running, False
        if was_running:  # Its outbox is empty, so its harvester did not fail for what made the last one fail.
            tenant.backoff.succeeded()
        tenant.is_refused, tenant.has_failed, tenant.is_resting = False, False, True
        return was_running

    def _admit(self, schema: str) -> None:
        """Take in that a tenant is neither refused nor at rest by now."""
        if (tenant := self._tenants.get(schema)) is not None:
            tenant.is_refused = tenant.is_resting = False

    def _is_due(self, schema: str, now: float) -> bool:
        """Whether an admitted tenant waits to be started."""
        tenant = self._tenants.get(schema)
        return tenant is None or (not tenant.is_running and tenant.not_before <= now)

    def _due_since(self, schema: str) -> float:
        tenant = self._tenants.get(schema)
        return float("-inf") if tenant is None else tenant.not_before

    def failed_at(self, schema: str, reason: str, now: float) -> TenantRestart | None:
        """A tenant's harvester has ended by itself, or could not start.

        Args:
            schema: the tenant.
            reason: why.
            now: the time.

        Returns:
            When it will be started again; None for a tenant that is gone, refused, or at rest.
        """
        tenant = self._tenants.get(schema)
        if tenant is None or tenant.is_refused or tenant.is_resting:
            return None
        if now - tenant.since >= WELL_SECONDS:
            tenant.backoff.succeeded()
            tenant.logged = None
        seconds = tenant.backoff.wait()
        tenant.is_running, tenant.has_failed, tenant.not_before = False, True, now + seconds
        return TenantRestart(seconds, tenant.is_news(reason, now))
