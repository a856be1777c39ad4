"""Whether a record that failed is tried again, and when, or becomes a dead letter.

Only a record's own failures count against it. An outage, or a transaction that Postgres rolled back in favour of
another one, does not: the record is tried until it succeeds or fails by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

# SQLSTATE classes: 40, the transaction was rolled back in favour of another; 53, resources are short; 57P, an
# administrator ended the session, or the server starts; 58, a system error. Class 08 (connection exception) does count
# against the record: while our session lives, it comes from another server that the handler talks to.
_NOT_ITS_FAULT = ("40", "53", "57P", "58")
MAX_LOSSES = 6  # Two outages in a row may hit one record's handler, but not this many.


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a record is tried, and how long it waits between.

    Attributes:
        attempts: the number of failures after which a record becomes a dead letter.
        first_seconds: the wait after its first failure; it doubles with each failure.
        most_seconds: the longest wait.
    """

    attempts: int = 6
    first_seconds: float = 0.1
    most_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 < self.first_seconds <= self.most_seconds:
            raise ValueError(f"expected attempts >= 1 and 0 < first_seconds <= most_seconds (given: {self})")

    def wait(self, failures: int, jitter: float) -> float:
        """Return the seconds to wait after so many failures, less up to half of them by `jitter` in [0, 1)."""
        return min(self.most_seconds, self.first_seconds * 2.0 ** min(failures - 1, 60)) * (1 - jitter / 2)

    def is_spent(self, failures: int) -> bool:
        """Whether a record with so many failures becomes a dead letter."""
        return failures >= self.attempts


def counts_against_the_record(sqlstate: str | None, *, connection_lost: bool) -> bool:
    """Whether a failure counts as one of the record's attempts.

    Args:
        sqlstate: the error code of Postgres; None for other failures.
        connection_lost: the connection was lost, or the server did not answer in time.
    """
    return not connection_lost and not (sqlstate or "").startswith(_NOT_ITS_FAULT)
