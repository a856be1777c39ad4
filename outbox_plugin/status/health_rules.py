"""How bad it is, why, and what to do: what the checks say. Pure: a status and limits come in, a judgement goes out."""

from __future__ import annotations

from dataclasses import dataclass

from outbox_plugin.status.reader import Status


@dataclass(frozen=True, slots=True)
class Limits:
    """From when on a failure warns, and from when on it is an error. In seconds, and in dead letters.

    `lag_…` is the age of the oldest event that waits; trouble of any other kind becomes an error once it has lasted for
    `lag_error_seconds`.
    """

    lag_warn_seconds: float = 30.0
    lag_error_seconds: float = 300.0
    dead_letters_error: int = 100


@dataclass(frozen=True, slots=True)
class HealthResult:
    """Whether all is well; if not, whether it is an error or a warning, why in a sentence, and what to do."""

    passed: bool
    explanation: str
    severe: bool = False
    what_to_do: str = ""


def troubles(status: Status) -> str:
    """What is wrong, in a sentence; empty when nothing is."""
    said = [f"shard {shard.shard} is paused" for shard in status.shards if shard.paused]
    said += [f"shard {shard.shard}: {shard.trouble}" for shard in status.shards if shard.trouble]
    said += [f"shard {shard.shard} has no leader" for shard in status.shards if shard.leader is None]
    return "; ".join([*status.errors, *said])


def health(status: Status, limits: Limits, troubled_seconds: float = 0.0) -> HealthResult:
    """Whether every shard has a leader that is heard and has no trouble, and no event waits too long.

    `troubled_seconds`: for how long it has been otherwise, as far as is known.
    """
    lag = status.oldest_seconds or 0.0
    said = troubles(status)
    if lag > limits.lag_warn_seconds:
        late = f"the oldest event has waited for {lag:.0f} s (at most {limits.lag_warn_seconds:.0f} s are wanted)"
        said = "; ".join(filter(None, [late, said]))
    if not said:
        return HealthResult(True, "a leader is heard, and it has no trouble")
    severe = max(lag, troubled_seconds) > limits.lag_error_seconds
    return HealthResult(False, said, severe, _remedy(status))


def dead_letters(status: Status, limits: Limits) -> HealthResult:
    """Whether no row was refused by Kafka: neither put aside as a dead letter nor parked with its key."""
    count, parked = status.dead_letters, status.parked_keys
    if status.backlog is None:
        return HealthResult(False, "; ".join(status.errors) or "Postgres does not tell", False, _remedy(status))
    if not count and not parked:
        return HealthResult(True, "Kafka has refused no row")
    said = [f"{count} rows that Kafka refused are dead letters"] if count else []
    example = f" (such as {status.parked[0].topic}: {status.parked[0].reason})" if status.parked else ""
    said += [f"{parked} keys wait behind a row that Kafka refused{example}"] if parked else []
    return HealthResult(
        False,
        " and ".join(said),
        count + parked >= limits.dead_letters_error,
        "see why with `outbox dead-letters list` and `outbox parked list`; mend the cause (the topic, its size limit, "
        "the row), then launch the job that retries dead letters or releases parked keys",
    )


def undrained(left: int, seconds: float, status: Status) -> HealthResult:
    """What to say of `left` events that still wait after `seconds`."""
    why = troubles(status) or "the harvester is too slow"
    return HealthResult(False, f"{left} events still wait after {seconds:.0f} s: {why}", True, _remedy(status))


def _remedy(status: Status) -> str:
    """What mends the first thing that is wrong, in the order in which one thing causes the next."""
    if any(error.startswith("Postgres") for error in status.errors):
        return "see that Postgres runs and can be reached from here as OUTBOX_DSN names it; what is written waits"
    if any(error.startswith("Kafka") for error in status.errors):
        return "see that Kafka runs and can be reached from here as OUTBOX_BOOTSTRAP_SERVERS names it; events wait"
    if any(shard.paused for shard in status.shards):
        return "launch the job outbox_resume, or `outbox resume`, when events may leave again"
    if any(shard.trouble for shard in status.shards):
        return "do what the trouble says; the harvester's log, linked on its asset, tells more"
    if any(shard.leader is None for shard in status.shards):
        return (
            "see that the harvester's sensor is on and read the log that its asset links; "
            'with mode="observe", start `outbox harvest` where it should run'
        )
    return "compare records/s with what is emitted on the harvester's plots: it is too slow, or has just caught up"
