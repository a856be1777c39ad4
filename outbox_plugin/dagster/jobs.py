"""Jobs that carry out an operator's commands on an outbox, and report the result."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from dagster import Config, Failure, JobDefinition, MetadataValue, OpDefinition, OpExecutionContext, job, op
from pydantic import Field

from outbox_plugin.core.utc import in_utc_if_naive
from outbox_plugin.dagster.health import Metadata
from outbox_plugin.dagster.resources import OutboxResource
from outbox_plugin.errors import OutboxError
from outbox_plugin.operate import pause, release, replay, resume, retry_dead_letters
from outbox_plugin.settings import Settings
from outbox_plugin.status.reader import read_status


class ShardConfig(Config):
    """The part of the outbox that is paused or resumed."""

    shard: int | None = Field(default=None, ge=0, description="One shard, counted from 0; by default all shards.")


class ReplayConfig(Config):
    """The kept events that are emitted again."""

    topic: str | None = Field(default=None, description="Only of this topic.")
    key: str | None = Field(default=None, description="Only of this key.")
    since: str | None = Field(
        default=None, description="Published at this time or later, such as 2026-01-31T12:00; in UTC without an offset."
    )
    until: str | None = Field(default=None, description="Published before this time; in UTC without an offset.")


class DeadLettersConfig(Config):
    """The dead letters that are retried."""

    ids: list[int] | None = Field(
        default=None, description="Their ids, which `outbox dead-letters list` prints; by default all."
    )


class ParkedKeysConfig(Config):
    """The parked keys that are released."""

    topic: str | None = Field(default=None, description="Only of this topic.")
    key: str | None = Field(default=None, description="Only this key.")


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command: a sentence, and the number of rows or keys, where the command has one."""

    text: str
    count: int | None = None


def build_outbox_jobs(*, resource_key: str = "outbox", prefix: str = "") -> list[JobDefinition]:
    """The jobs `outbox_pause`, `outbox_resume`, `outbox_replay`, `outbox_retry_dead_letters`, `outbox_release_parked`.

    Each is configured in the launchpad. Its one step reports what it did in its log, and as metadata of its output.

    Args:
        resource_key: names the `OutboxResource` of the outbox.
        prefix: comes before each name.
    """

    def carried_out(context: OpExecutionContext, command: Callable[[Settings], CommandResult]) -> None:
        """Carry out a command, and report its result in the log and as metadata.

        Raises:
            Failure: the command cannot be carried out; nothing has changed.
        """
        resource: OutboxResource = getattr(context.resources, resource_key)
        settings = resource.settings()
        try:
            done = command(settings)
        except OutboxError as error:
            raise Failure(str(error), allow_retries=False) from None
        status = read_status(settings)
        paused = [f"shard {shard.shard}" for shard in status.shards if shard.paused]
        confirmed: Metadata = {
            "done": MetadataValue.text(done.text),
            "paused_shards": MetadataValue.text(", ".join(paused) or "none"),
            "parked_keys": MetadataValue.int(status.parked_keys),
            "dead_letters": MetadataValue.int(status.dead_letters),
        }
        if status.backlog is not None:
            confirmed["backlog"] = MetadataValue.int(status.backlog)
        if done.count is not None:
            confirmed["count"] = MetadataValue.int(done.count)
        context.log.info(done.text)
        context.add_output_metadata(confirmed)

    @op(name=f"{prefix}pause", required_resource_keys={resource_key})
    def pause_outbox(context: OpExecutionContext, config: ShardConfig) -> None:
        """Stop publishing until the outbox is resumed. Every harvester obeys, also after a restart."""
        carried_out(context, lambda settings: _paused(settings, config.shard))

    @op(name=f"{prefix}resume", required_resource_keys={resource_key})
    def resume_outbox(context: OpExecutionContext, config: ShardConfig) -> None:
        """Publish events again."""
        carried_out(context, lambda settings: _resumed(settings, config.shard))

    @op(name=f"{prefix}replay", required_resource_keys={resource_key})
    def replay_outbox(context: OpExecutionContext, config: ReplayConfig) -> None:
        """Emit kept events again, each with the header `outbox-replay`."""
        carried_out(context, lambda settings: _replayed(settings, config))

    @op(name=f"{prefix}retry_dead_letters", required_resource_keys={resource_key})
    def retry_letters(context: OpExecutionContext, config: DeadLettersConfig) -> None:
        """Emit dead letters again, behind all events that wait."""
        carried_out(context, lambda settings: _retried(settings, config.ids))

    @op(name=f"{prefix}release_parked", required_resource_keys={resource_key})
    def release_parked_keys(context: OpExecutionContext, config: ParkedKeysConfig) -> None:
        """Release parked keys, whose events go on in order. A key whose row is still refused is parked again."""
        carried_out(context, lambda settings: _released(settings, config))

    commands = (pause_outbox, resume_outbox, replay_outbox, retry_letters, release_parked_keys)
    names = ("pause", "resume", "replay", "retry_dead_letters", "release_parked")
    return [_job(f"{prefix}outbox_{name}", command) for name, command in zip(names, commands, strict=True)]


def _job(name: str, command: OpDefinition) -> JobDefinition:
    # The launchpad starts from this configuration. Its own would have asterisks in the place of the outbox's secrets.
    @job(name=name, description=command.description, config={"ops": {command.name: {"config": {}}}})
    def outbox_job() -> None:
        command()

    return outbox_job


def _of(shard: int | None) -> str:
    return "the outbox" if shard is None else f"shard {shard}"


def _paused(settings: Settings, shard: int | None) -> CommandResult:
    pause(settings, shard)
    return CommandResult(f"{_of(shard)} is paused: events wait until it is resumed")


def _resumed(settings: Settings, shard: int | None) -> CommandResult:
    resume(settings, shard)
    return CommandResult(f"{_of(shard)} goes on")


def _replayed(settings: Settings, config: ReplayConfig) -> CommandResult:
    since, until = _time("since", config.since), _time("until", config.until)
    count = replay(settings, topic=config.topic, key=config.key, since=since, until=until)
    why = "" if count else "; events are kept where OUTBOX_RETENTION says for how long"
    return CommandResult(f"{count} events are emitted again{why}", count)


def _retried(settings: Settings, ids: list[int] | None) -> CommandResult:
    count = retry_dead_letters(settings, ids)
    return CommandResult(f"{count} dead letters are events of the outbox again", count)


def _released(settings: Settings, config: ParkedKeysConfig) -> CommandResult:
    count = len(release(settings, topic=config.topic, key=config.key))
    return CommandResult(f"{count} parked keys go on", count)


def _time(name: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return in_utc_if_naive(datetime.fromisoformat(text))
    except ValueError:
        raise Failure(
            f"{name}: expected a time such as 2026-01-31T12:00+00:00 (given: {text!r})", allow_retries=False
        ) from None
