"""Which tenants' harvesters to start and to stop, as tenants come, go and fail. No I/O, no clock.

A tenant is known by its schema. One that fails is started again after a wait, which doubles each time that it fails
soon after its start. So a tenant that is broken costs little, and harms no other one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice

from outbox_plugin.core.backoff import Backoff

RETRY_FIRST, RETRY_LAST = 5.0, 60.0  # Seconds.
WELL_SECONDS = 300.0  # A harvester that has run for so long did not fail for what made the last one fail.


@dataclass(slots=True)
class _Tenant:
    is_running: bool = False  # From the decision to start it to the end of its harvester.
    since: float = 0.0  # When it was last started.
    not_before: float = 0.0  # When it may be started again.
    backoff: Backoff = field(default_factory=lambda: Backoff(RETRY_FIRST, RETRY_LAST))


@dataclass(frozen=True, slots=True)
class Changes:
    """The schemas whose harvesters are to be started and stopped."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


class TenantSchedule:
    """Decides for one process. `now` is in seconds of a monotonic clock."""

    def __init__(self) -> None:
        """No tenant is known yet."""
        self._tenants: dict[str, _Tenant] = {}

    @property
    def running(self) -> int:
        """How many tenants are harvested, or being started."""
        return sum(each.is_running for each in self._tenants.copy().values())

    @property
    def failed(self) -> tuple[str, ...]:
        """The tenants that could not be harvested, and wait to be started again."""
        return tuple(schema for schema, each in self._tenants.copy().items() if not each.is_running)

    def changes(self, found: Collection[str], now: float, room: int) -> Changes:
        """What to do now; what is returned counts as done.

        Args:
            found: the schemas that have outboxes.
            now: the time.
            room: how many may be started.
        """
        gone = [schema for schema in self._tenants if schema not in found]
        stop = tuple(schema for schema in gone if self._tenants.pop(schema).is_running)
        start = tuple(islice((schema for schema in found if self._may_start(schema, now)), room))
        for schema in start:
            tenant = self._tenants.setdefault(schema, _Tenant())
            tenant.is_running, tenant.since = True, now
        return Changes(start, stop)

    def _may_start(self, schema: str, now: float) -> bool:
        tenant = self._tenants.get(schema)
        return tenant is None or (not tenant.is_running and tenant.not_before <= now)

    def failed_at(self, schema: str, now: float) -> float | None:
        """A tenant's harvester has ended by itself, or could not start.

        Returns:
            After how many seconds it will be started again; None for a tenant that is gone.
        """
        if (tenant := self._tenants.get(schema)) is None:
            return None
        if now - tenant.since >= WELL_SECONDS:
            tenant.backoff.succeeded()
        seconds = tenant.backoff.wait()
        tenant.is_running, tenant.not_before = False, now + seconds
        return seconds
