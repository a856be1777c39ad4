"""Jobs that give an outbox orders, and confirm what came of them."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from dagster import Config, Failure, JobDefinition, MetadataValue, OpDefinition, OpExecutionContext, job, op
from pydantic import Field

from outbox_plugin.dagster.health import Metadata
from outbox_plugin.dagster.resources import OutboxResource
from outbox_plugin.errors import OutboxError
from outbox_plugin.operate import pause, release, replay, resume, retry_dead_letters
from outbox_plugin.settings import Settings
from outbox_plugin.status.reader import read_status


class ShardConfig(Config):
    """Which part of the outbox."""

    shard: int | None = Field(default=None, ge=0, description="One shard, counted from 0; by default all of them.")


class ReplayConfig(Config):
    """Which of the kept events."""

    topic: str | None = Field(default=None, description="Only of this topic.")
    key: str | None = Field(default=None, description="Only of this key.")
    since: str | None = Field(default=None, description="Published then or later, as in 2026-01-31T12:00+00:00.")
    until: str | None = Field(default=None, description="Published before this time.")


class LettersConfig(Config):
    """Which dead letters."""

    ids: list[int] | None = Field(default=None, description="Their ids, as in `outbox dead-letters list`; or all.")


class LanesConfig(Config):
    """Which parked keys."""

    topic: str | None = Field(default=None, description="Only of this topic.")
    key: str | None = Field(default=None, description="Only this key.")


@dataclass(frozen=True, slots=True)
class Done:
    """What an order came to: a sentence, and how many rows or keys it was about, where it was about such."""

    said: str
    count: int | None = None


def build_outbox_jobs(*, resource_key: str = "outbox", prefix: str = "") -> list[JobDefinition]:
    """The jobs `outbox_pause`, `outbox_resume`, `outbox_replay`, `outbox_retry_dead_letters`, `outbox_release_parked`.

    They are for the outbox of the resource `resource_key`; `prefix` goes before each name. Each is configured in the
    launchpad, and its one step confirms what it did: in its log, and as metadata of its output.
    """

    def carried_out(context: OpExecutionContext, order: Callable[[Settings], Done]) -> None:
        """Carry out an order, and say so.

        Raises:
            Failure: it cannot be carried out, and why; nothing has changed.
        """
        resource: OutboxResource = getattr(context.resources, resource_key)
        settings = resource.settings()
        try:
            done = order(settings)
        except OutboxError as error:
            raise Failure(str(error), allow_retries=False) from None
        status = read_status(settings)
        paused = [f"shard {shard.shard}" for shard in status.shards if shard.paused]
        confirmed: Metadata = {
            "done": MetadataValue.text(done.said),
            "paused_shards": MetadataValue.text(", ".join(paused) or "none"),
            "parked_keys": MetadataValue.int(status.parked_keys),
            "dead_letters": MetadataValue.int(status.dead_letters),
        }
        if status.backlog is not None:
            confirmed["backlog"] = MetadataValue.int(status.backlog)
        if done.count is not None:
            confirmed["count"] = MetadataValue.int(done.count)
        context.log.info(done.said)
        context.add_output_metadata(confirmed)

    @op(name=f"{prefix}pause", required_resource_keys={resource_key})
    def pause_outbox(context: OpExecutionContext, config: ShardConfig) -> None:
        """Let no more events leave, until resumed; every harvester obeys, also after a restart."""
        carried_out(context, lambda settings: _paused(settings, config.shard))

    @op(name=f"{prefix}resume", required_resource_keys={resource_key})
    def resume_outbox(context: OpExecutionContext, config: ShardConfig) -> None:
        """Let events leave again."""
        carried_out(context, lambda settings: _resumed(settings, config.shard))

    @op(name=f"{prefix}replay", required_resource_keys={resource_key})
    def replay_outbox(context: OpExecutionContext, config: ReplayConfig) -> None:
        """Emit kept events again, each marked by the header `outbox-replay`."""
        carried_out(context, lambda settings: _replayed(settings, config))

    @op(name=f"{prefix}retry_dead_letters", required_resource_keys={resource_key})
    def retry_letters(context: OpExecutionContext, config: LettersConfig) -> None:
        """Make dead letters events of the outbox again, behind all others."""
        carried_out(context, lambda settings: _retried(settings, config.ids))

    @op(name=f"{prefix}release_parked", required_resource_keys={resource_key})
    def release_lanes(context: OpExecutionContext, config: LanesConfig) -> None:
        """Let parked keys go on, in their order; one whose row is still refused parks again."""
        carried_out(context, lambda settings: _released(settings, config))

    orders = (pause_outbox, resume_outbox, replay_outbox, retry_letters, release_lanes)
    names = ("pause", "resume", "replay", "retry_dead_letters", "release_parked")
    return [_job(f"{prefix}outbox_{name}", order) for name, order in zip(names, orders, strict=True)]


def _job(name: str, order: OpDefinition) -> JobDefinition:
    # What the launchpad starts from. Without it, that would be all defaults, with asterisks for the outbox's secrets.
    @job(name=name, description=order.description, config={"ops": {order.name: {"config": {}}}})
    def outbox_job() -> None:
        order()

    return outbox_job


def _of(shard: int | None) -> str:
    return "the outbox" if shard is None else f"shard {shard}"


def _paused(settings: Settings, shard: int | None) -> Done:
    pause(settings, shard)
    return Done(f"{_of(shard)} is paused: events wait until it is resumed")


def _resumed(settings: Settings, shard: int | None) -> Done:
    resume(settings, shard)
    return Done(f"{_of(shard)} goes on")


def _replayed(settings: Settings, config: ReplayConfig) -> Done:
    since, until = _time("since", config.since), _time("until", config.until)
    count = replay(settings, topic=config.topic, key=config.key, since=since, until=until)
    why = "" if count else "; events are kept where OUTBOX_RETENTION says for how long"
    return Done(f"{count} events are emitted again{why}", count)


def _retried(settings: Settings, ids: list[int] | None) -> Done:
    count = retry_dead_letters(settings, ids)
    return Done(f"{count} dead letters are events of the outbox again", count)


def _released(settings: Settings, config: LanesConfig) -> Done:
    count = len(release(settings, topic=config.topic, key=config.key))
    return Done(f"{count} parked keys go on", count)


def _time(name: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise Failure(
            f"{name}: expected a time such as 2026-01-31T12:00+00:00 (given: {text!r})", allow_retries=False
        ) from None
