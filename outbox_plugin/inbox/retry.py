"""Whose fault a failure is, whether the record is tried again, and when, or becomes a dead letter.

A record becomes a dead letter after so many failures of each kind:

    what failed                                                         fault      failures
    the handler, by an error of its own                                 RECORD     `Retry.attempts`
    the connection was lost after the handler had begun                 LOST       MAX_LOSSES
    a server that the handler uses is short of resources, or ends       SHORTAGE   MAX_SHORTAGES
    anything before the handler began, a server that does not answer
    in time, a transaction rolled back in favour of another one         NOBODY     never

A database's error counts the same if another error wraps it, as SQLAlchemy, Django and handlers do.

An outage of Postgres hits each record once or twice: until Postgres is back, no handler begins. A shortage of Postgres'
own cannot be told from one of a server that the handler alone uses, such as that of a foreign table. So a record may
have many of them, and it becomes a dead letter only if Postgres can write it as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

MAX_LOSSES = 6  # Two outages in a row may hit one record's handler, but not this many.
MAX_SHORTAGES = 20  # With the default waits, this takes three to six minutes.

# Classes of SQLSTATE. 40: the transaction was rolled back in favour of another one.
_NOBODYS = "40"
# 53: resources are short. 57P: an administrator ended a session, or a server starts. 58: a system error. While our own
# session lives, 57P comes from another server. So does class 08 (connection exception), but it counts as an error of
# the handler: no shortage of our own server looks like that.
_SHORTAGES = ("53", "57P", "58")


class Fault(Enum):
    """Whose fault a failure is; see the table above."""

    RECORD = "record"
    LOST = "lost"
    SHORTAGE = "shortage"
    NOBODY = "nobody"


def fault_of(sqlstate: str | None) -> Fault:
    """Return whose fault an error is that left a handler whose connection lives.

    Args:
        sqlstate: the error code of Postgres; None for other errors.
    """
    code = sqlstate or ""
    if code.startswith(_NOBODYS):
        return Fault.NOBODY
    return Fault.SHORTAGE if code.startswith(_SHORTAGES) else Fault.RECORD


def sqlstate_of(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error, or of the first one behind it that has one; None if there is none."""
    behind: BaseException | None = error
    seen: set[int] = set()
    while behind is not None and id(behind) not in seen:
        seen.add(id(behind))
        if (own := _own_sqlstate(behind)) is not None:
            return own
        hidden = behind.__cause__ is not None or behind.__suppress_context__
        behind = behind.__cause__ if hidden else behind.__context__
    return None


def _own_sqlstate(error: BaseException) -> str | None:
    try:
        own = getattr(error, "sqlstate", None)
    except Exception:  # A user's class may fail.
        return None
    return own if isinstance(own, str) else None


class Failures(NamedTuple):
    """How often a record has failed, by fault. Failures that are nobody's fault are not counted."""

    own: int = 0
    losses: int = 0
    shortages: int = 0

    def plus(self, fault: Fault) -> Failures:
        """Return these failures, and one more."""
        match fault:
            case Fault.RECORD:
                return self._replace(own=self.own + 1)
            case Fault.LOST:
                return self._replace(losses=self.losses + 1)
            case Fault.SHORTAGE:
                return self._replace(shortages=self.shortages + 1)
            case Fault.NOBODY:
                return self

    @property
    def total(self) -> int:
        """How many failures these are."""
        return self.own + self.losses + self.shortages


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

    def is_spent(self, failures: Failures) -> bool:
        """Whether a record with so many failures becomes a dead letter."""
        return failures.own >= self.attempts or failures.losses >= MAX_LOSSES or failures.shortages >= MAX_SHORTAGES
