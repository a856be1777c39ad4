"""Which tenants are put to rest because nobody emits events there, and when they are woken. No I/O, no clock.

A tenant at rest has no harvester. It is woken as soon as an id has been drawn for a row of its outbox, while a
transaction may have drawn one, and when its outbox was replaced or emptied. Rows with ids of their own making show in
the table alone, so the outboxes of resting tenants are looked into from time to time. A tenant of which no drawn id can
be seen is never put to rest.

A tenant is put to rest when no id has been drawn for so long, and its outbox is empty. While others wait for its place,
a second is enough. It is woken now and then in any
case, because its harvester has more to do than to relay: it drops what was kept for long enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import NamedTuple

LOOK_AGAIN_SECONDS = 60.0  # Between two looks into the outbox of a tenant at rest.
LONGEST_REST_SECONDS = 6 * 3600.0
CROWDED_REST_SECONDS = 1.0  # A tenant is put to rest after so long where others wait for a place.
LOOKS_AT_ONCE = 100  # Each takes a request to Postgres.


class Seen(NamedTuple):
    """What tells of a tenant's outbox whether rows were inserted.

    Attributes:
        drawn: another text as soon as an id was drawn, or the table or its sequence was replaced or emptied. The last
            id alone would not do: a tenant that is restored begins with the id that it ended with.
        is_writing: whether an open transaction may have drawn an id.
    """

    drawn: str
    is_writing: bool


class Look(NamedTuple):
    """What was seen of the tenants at one time.

    Attributes:
        seen: by schema. A tenant of whose ids nothing can be seen is missing.
        has_rows: of the tenants that were looked into, whether their outboxes have rows.
    """

    seen: Mapping[str, Seen]
    has_rows: Mapping[str, bool]


@dataclass(slots=True)
class _Tenant:
    is_resting: bool = True
    since: float = float("-inf")  # When it was put to rest, or was last active.
    looked_into_at: float = float("-inf")
    drawn: str | None = None


class TenantActivity:
    """Decides for one process. `now` is in seconds of a monotonic clock."""

    def __init__(self, rest_after: float) -> None:
        """No tenant is known yet.

        Args:
            rest_after: the seconds without events after which a tenant is put to rest.
        """
        self._longest_quiet = self._rest_after = rest_after
        self._tenants: dict[str, _Tenant] = {}

    @property
    def resting(self) -> frozenset[str]:
        """The tenants at rest. A new one is at rest until it was looked into."""
        return frozenset(schema for schema, each in self._tenants.copy().items() if each.is_resting)

    def others_wait(self, *, they_do: bool) -> None:
        """Know whether tenants wait for the places of others."""
        self._rest_after = min(self._longest_quiet, CROWDED_REST_SECONDS) if they_do else self._longest_quiet

    def follow(self, schemas: Iterable[str]) -> None:
        """Know these tenants, and no others."""
        self._tenants = {schema: self._tenants.get(schema) or _Tenant() for schema in schemas}

    def to_look_into(self, now: float) -> list[str]:
        """The tenants of whose outboxes it must be known whether they have rows, at most `LOOKS_AT_ONCE`."""
        due = [schema for schema, each in self._tenants.items() if self._is_due(each, now)]
        return nsmallest(LOOKS_AT_ONCE, due, key=lambda schema: self._tenants[schema].looked_into_at)

    def _is_due(self, tenant: _Tenant, now: float) -> bool:
        if tenant.is_resting:
            return now - tenant.looked_into_at >= LOOK_AGAIN_SECONDS
        return now - tenant.since >= self._rest_after

    def looked(self, look: Look, now: float) -> None:
        """Take in what was seen.

        Args:
            look: of all tenants that `follow` was told of.
            now: the time.
        """
        for schema, tenant in self._tenants.items():
            seen, has_rows = look.seen.get(schema), look.has_rows.get(schema)
            is_active = seen is None or seen.is_writing or bool(has_rows) or tenant.drawn not in (None, seen.drawn)
            tenant.drawn = None if seen is None else seen.drawn
            if has_rows is not None:
                tenant.looked_into_at = now
            self._decide(tenant, is_active=is_active, is_empty=has_rows is False, now=now)

    def _decide(self, tenant: _Tenant, *, is_active: bool, is_empty: bool, now: float) -> None:
        if is_active:
            tenant.is_resting, tenant.since = False, now
        elif tenant.is_resting:
            if tenant.since == float("-inf"):
                tenant.since = now if is_empty else tenant.since
            elif now - tenant.since >= LONGEST_REST_SECONDS:
                tenant.is_resting, tenant.since = False, now
        elif is_empty and now - tenant.since >= self._rest_after:
            tenant.is_resting, tenant.since = True, now
