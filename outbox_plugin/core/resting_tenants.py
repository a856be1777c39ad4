"""Which tenants are put to rest because nobody emits events there, and when they are woken. No I/O, no clock.

A tenant at rest has no harvester. It is woken while a transaction may have drawn an id for a row of its outbox, and
when its outbox has rows. The outbox is checked as soon as an id was drawn, and when the table was replaced or emptied.
A row may be committed just after such a check. So the outbox is checked again, until nothing has changed since the
check before. Rows with ids of their own making show in the table alone, so the outbox is checked when a writer notifies
us, too, and the outboxes of all resting tenants are checked from time to time. A tenant of which no drawn id can be
seen is never put to rest.

Drawn ids alone wake nobody: when Postgres recovers from a crash, the sequences of all tenants jump.

A tenant is put to rest when no id has been drawn for so long, and its outbox is empty. While others wait for its place,
a second is enough. It is woken now and then in any case, because its harvester has more to do than to relay: it drops
what was kept for long enough. These tenants are woken one by one, so that those with events do not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import NamedTuple

CHECK_AGAIN_SECONDS = 60.0  # Between two checks of the outbox of a tenant at rest.
LONGEST_REST_SECONDS = 6 * 3600.0
CROWDED_REST_SECONDS = 1.0  # A tenant is put to rest after so long where others wait for a place.
CHECKS_AT_ONCE = 100  # Each takes a request to Postgres.


class OutboxActivity(NamedTuple):
    """What tells of a tenant's outbox whether rows were inserted.

    Attributes:
        drawn: another text as soon as an id was drawn, or the table or its sequence was replaced or emptied. The last
            id alone would not do: a tenant that is restored begins with the id that it ended with.
        is_writing: whether an open transaction may have drawn an id.
    """

    drawn: str
    is_writing: bool


class ActivitySnapshot(NamedTuple):
    """What was seen of the tenants at one time.

    Attributes:
        activity: by schema. A tenant of whose ids nothing can be seen is missing.
        has_rows: of the tenants that were checked, whether their outboxes have rows.
    """

    activity: Mapping[str, OutboxActivity]
    has_rows: Mapping[str, bool]


@dataclass(slots=True)
class _Tenant:
    is_resting: bool = True
    since: float = float("-inf")  # When it was put to rest, or was last active.
    checked_at: float = float("-inf")
    drawn: str | None = None
    is_unsure: bool = True  # Whether rows may have been inserted since it was checked.


class RestingTenants:
    """Decides for one process. `now` is in seconds of a monotonic clock."""

    def __init__(self, rest_after: float) -> None:
        """No tenant is known yet.

        Args:
            rest_after: the seconds without events after which a tenant is put to rest.
        """
        self._usual_rest_after = self._rest_after = rest_after
        self._tenants: dict[str, _Tenant] = {}

    @property
    def resting(self) -> frozenset[str]:
        """The tenants at rest. A new one is at rest until it was checked."""
        return frozenset(schema for schema, each in self._tenants.copy().items() if each.is_resting)

    def set_crowded(self, *, is_crowded: bool) -> None:
        """Note whether tenants wait for the places of others."""
        usual = self._usual_rest_after
        self._rest_after = min(usual, CROWDED_REST_SECONDS) if is_crowded else usual

    def follow(self, schemas: Iterable[str]) -> None:
        """Know these tenants, and no others."""
        self._tenants = {schema: self._tenants.get(schema) or _Tenant() for schema in schemas}

    def note_writers(self, schemas: Iterable[str]) -> None:
        """Note that somebody says to have inserted rows for these tenants."""
        for schema in schemas:
            if (tenant := self._tenants.get(schema)) is not None:
                tenant.is_unsure = True

    def to_check(self, activity: Mapping[str, OutboxActivity], now: float) -> list[str]:
        """The tenants of whose outboxes it must be known whether they have rows, at most `CHECKS_AT_ONCE`.

        Args:
            activity: what has just been seen of all tenants, by schema.
            now: the time.
        """
        due = {
            schema: (not tenant.is_resting or not _may_have_rows(tenant, activity[schema]), tenant.checked_at)
            for schema, tenant in self._tenants.items()
            if schema in activity and self._is_due(tenant, activity[schema], now)
        }
        return nsmallest(CHECKS_AT_ONCE, due, key=due.__getitem__)

    def _is_due(self, tenant: _Tenant, activity: OutboxActivity, now: float) -> bool:
        if activity.is_writing:
            return False
        if tenant.is_resting:
            return _may_have_rows(tenant, activity) or now - tenant.checked_at >= CHECK_AGAIN_SECONDS
        return now - tenant.since >= self._rest_after

    def update(self, snapshot: ActivitySnapshot, now: float) -> None:
        """Take in what was read.

        Args:
            snapshot: of all tenants that `follow` was told of.
            now: the time.
        """
        for schema, tenant in self._tenants.items():
            activity, has_rows = snapshot.activity.get(schema), snapshot.has_rows.get(schema)
            has_changed = activity is None or activity.drawn != tenant.drawn
            tenant.drawn = None if activity is None else activity.drawn
            tenant.is_unsure = has_changed or (tenant.is_unsure and has_rows is None)
            if has_rows is not None:
                tenant.checked_at = now
            is_active = (
                activity is None or activity.is_writing or bool(has_rows) or (has_changed and not tenant.is_resting)
            )
            self._decide(tenant, is_active=is_active, is_empty=has_rows is False, now=now)
        self._wake_longest(now)

    def _decide(self, tenant: _Tenant, *, is_active: bool, is_empty: bool, now: float) -> None:
        if is_active:
            tenant.is_resting, tenant.since = False, now
        elif tenant.is_resting:
            if is_empty and tenant.since == float("-inf"):
                tenant.since = now
        elif is_empty and now - tenant.since >= self._rest_after:
            tenant.is_resting, tenant.since = True, now

    def _wake_longest(self, now: float) -> None:
        """Wake the tenant that has been at rest for longest, if that is long enough."""
        resting = [each for each in self._tenants.values() if each.is_resting and each.since > float("-inf")]
        longest = min(resting, key=lambda tenant: tenant.since, default=None)
        if longest is not None and now - longest.since >= LONGEST_REST_SECONDS:
            longest.is_resting, longest.since = False, now


def _may_have_rows(tenant: _Tenant, activity: OutboxActivity) -> bool:
    """Whether rows may have been inserted since the tenant was checked."""
    return tenant.is_unsure or tenant.drawn != activity.drawn
