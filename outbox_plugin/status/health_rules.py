"""Judges an outbox's health for checks: how bad it is, why, and what to do. Pure functions of a status and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outbox_plugin.errors import InvalidSetting, OutboxError
from outbox_plugin.status.reader import Status


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits above which a check warns, or is an error.

    Attributes:
        lag_warn_seconds: the age of the oldest waiting event above which a check warns.
        lag_error_seconds: the age above which it is an error; not less. Trouble of any other kind is an error once it
            has lasted this long.
        dead_letters_error: how many dead letters and parked keys together are an error.

    Raises:
        InvalidSetting: an event would be an error before it is a warning.
    """

    lag_warn_seconds: float = 30.0
    lag_error_seconds: float = 300.0
    dead_letters_error: int = 100

    def __post_init__(self) -> None:
        """Check that a warning comes before an error."""
        if not self.lag_warn_seconds <= self.lag_error_seconds:
            raise InvalidSetting(
                f"lag_warn_seconds: expected {self.lag_error_seconds:g}, which is lag_error_seconds, or less "
                f"(given: {self.lag_warn_seconds:g})"
            )


@dataclass(frozen=True, slots=True)
class HealthResult:
    """Whether all is well; if not, why, whether that is an error (`severe`) or a warning, and what to do."""

    passed: bool
    explanation: str
    severe: bool = False
    what_to_do: str = ""


def troubles(status: Status) -> str:
    """What is wrong, in one sentence; empty if nothing is."""
    faults = [f"shard {shard.shard} is paused" for shard in status.shards if shard.paused]
    faults += [f"shard {shard.shard}: {shard.trouble}" for shard in status.shards if shard.trouble]
    if not status.is_at_rest:
        faults += [f"shard {shard.shard} has no leader" for shard in status.shards if shard.leader is None]
    return "; ".join([*status.errors, *faults])


def health(status: Status, limits: Limits, troubled_seconds: float = 0.0) -> HealthResult:
    """Whether every shard has a leader that sends heartbeats and reports no trouble, and no event waits too long.

    Args:
        status: the outbox.
        limits: when a failure warns, and when it is an error.
        troubled_seconds: how long the failure has lasted, as far as is known.
    """
    lag = status.oldest_seconds or 0.0
    faults = troubles(status)
    if lag > limits.lag_warn_seconds:
        late = f"the oldest event has waited for {lag:.0f} s (the limit is {limits.lag_warn_seconds:.0f} s)"
        faults = "; ".join(filter(None, [late, faults]))
    if not faults:
        return HealthResult(True, "every shard has a leader without trouble")
    severe = max(lag, troubled_seconds) > limits.lag_error_seconds
    return HealthResult(False, faults, severe, _remedy(status))


def dead_letters(status: Status, limits: Limits) -> HealthResult:
    """Whether there is no row that Kafka refused: no dead letter, and no parked key."""
    count, parked = status.dead_letters, status.parked_keys
    if status.backlog is None:
        return HealthResult(False, "; ".join(status.errors) or "Postgres does not answer", False, _remedy(status))
    if not count and not parked:
        return HealthResult(True, "Kafka has refused no row")
    faults = [f"{count} rows that Kafka refused are dead letters"] if count else []
    example = f" (such as {status.parked[0].topic}: {status.parked[0].reason})" if status.parked else ""
    faults += [f"{parked} keys wait behind a row that Kafka refused{example}"] if parked else []
    return HealthResult(
        False,
        " and ".join(faults),
        count + parked >= limits.dead_letters_error,
        "see why with `outbox dead-letters list` and `outbox parked list`; fix the cause (the topic, its size limit, "
        "the row), then launch the job that retries dead letters or releases parked keys",
    )


def undrained(left: int, seconds: float, status: Status) -> HealthResult:
    """The result of a check that waited in vain for the outbox to drain.

    Args:
        left: how many events still wait.
        seconds: how long the check has waited.
        status: the outbox.
    """
    parked = f"{status.parked_keys} keys wait behind a row that Kafka refused" if status.parked_keys else ""
    why = troubles(status) or parked or "the harvester is too slow"
    return HealthResult(False, f"{left} events still wait after {seconds:.0f} s: {why}", True, _remedy(status))


def unanswered(error: OutboxError) -> HealthResult:
    """The result of a check that could not read what it judges, because of `error`."""
    return HealthResult(False, str(error), True, _remedy_of_errors([str(error)]))


def _remedy_of_errors(errors: Sequence[str]) -> str:
    """What to do about what a server, or somebody who asked it, reported; there is at least one error."""
    if any("permission denied" in error for error in errors):
        return "grant the role what `outbox grants --role monitor` prints"
    if any(error.startswith("Postgres") for error in errors):
        return "check that Postgres runs, and that it can be reached from here by OUTBOX_DSN; events wait meanwhile"
    if any(error.startswith("Kafka") for error in errors):
        return (
            "check that Kafka runs, and that it can be reached from here by OUTBOX_BOOTSTRAP_SERVERS; events wait "
            "meanwhile"
        )
    if any(error.startswith(("the topic", "Spark cannot read")) for error in errors):
        return "see that the topic is the one that is emitted to, and is there"
    return "do what the error says"


def _remedy(status: Status) -> str:
    """What to do about the first fault; those that cause others come first."""
    if status.errors:
        return _remedy_of_errors(status.errors)
    if any(shard.paused for shard in status.shards):
        return "when events may be published again, launch the job outbox_resume, or run `outbox resume`"
    if any(shard.trouble for shard in status.shards):
        return "act on the reported trouble; the harvester's log, which its asset links to, has the details"
    if any(shard.leader is None for shard in status.shards):
        return (
            "start `outbox harvest`, or read the log of the one that runs; where Dagster keeps the harvester running, "
            "check that its sensor is on, and read the log that its asset links to"
        )
    if status.parked_keys:
        return "see with `outbox parked list` which keys wait, and why; fix the row or its topic, then release the key"
    return "compare, on the harvester's plots, records/s with the events emitted: it is too slow, or has just caught up"
