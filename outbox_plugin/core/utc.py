"""Times without an offset are in UTC, here as everywhere."""

from __future__ import annotations

from datetime import UTC, datetime


def in_utc_if_naive(moment: datetime) -> datetime:
    """Return the time, in UTC if it has no offset."""
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
