"""What to do about a record that failed: again after a while, or a dead letter.

Only a record's own failures count against it. That a server is away, or that Postgres had a transaction give way to
another one, is no record's fault: such a record is tried until it gets its turn.
"""

from __future__ import annotations

from dataclasses import dataclass

# Transactions that gave way; resources that are short; an administrator who ends sessions; a server that is starting.
# Class 08 (connection exception) is not among them: on a session that lives, it is of a server the handler talks to.
_NOT_ITS_FAULT = ("40", "53", "57P", "58")
MAX_LOSSES = 6  # An outage can meet one record's handler, and the next outage too; but not so often in a row.


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a record is tried, and how long it waits between.

    Attributes:
        attempts: failures after which a record is laid among the dead letters.
        first_seconds: the wait after its first failure; it doubles with each.
        most_seconds: the longest wait.
    """

    attempts: int = 6
    first_seconds: float = 0.1
    most_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 < self.first_seconds <= self.most_seconds:
            raise ValueError(f"expected attempts >= 1 and 0 < first_seconds <= most_seconds (given: {self})")

    def wait(self, failures: int, jitter: float) -> float:
        """Seconds to wait after so many `failures`; `jitter` in [0, 1) takes up to half of them away."""
        return min(self.most_seconds, self.first_seconds * 2.0 ** min(failures - 1, 60)) * (1 - jitter / 2)

    def is_spent(self, failures: int) -> bool:
        """Whether a record that failed so often is given up."""
        return failures >= self.attempts


def counts_against_the_record(sqlstate: str | None, *, connection_lost: bool) -> bool:
    """Whether a failure is the record's, or its handler's, own."""
    return not connection_lost and not (sqlstate or "").startswith(_NOT_ITS_FAULT)
