"""The jobs that give orders: what they do to a running harvester, and how they confirm it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from dagster import DagsterInstance, Definitions, RunConfig
from dagster._config import process_config

from outbox_plugin import Harvester, Settings, operate
from outbox_plugin.dagster import OutboxResource, build_outbox_jobs
from outbox_plugin.errors import InvalidSetting
from outbox_plugin.status.reader import read_status
from tests.dagster_support import resources
from tests.harvesting import backlog, by_key, consume, drained, insert
from tests.support import eventually

pytestmark = pytest.mark.integration

TOO_LARGE = "x" * 2_000_000  # More than the client and the broker take.


def launched(settings: Settings, job: str, **config: Any) -> dict[str, Any]:
    """Launch a job as the launchpad does; what its step confirms."""
    outbox, _ = resources(settings)
    definitions = Definitions(jobs=build_outbox_jobs(), resources={"outbox": outbox})
    step = job.removeprefix("outbox_")
    with DagsterInstance.ephemeral() as instance:
        done = definitions.resolve_job_def(job).execute_in_process(
            instance=instance, run_config=RunConfig(ops={step: {"config": config}}), raise_on_error=False
        )
        if not done.success:
            [failure] = done.get_step_failure_events()
            reason = failure.step_failure_data.user_failure_data
            return {"failed": reason.description if reason else failure.message}
        [output] = [event for event in done.events_for_node(step) if event.is_successful_output]
    return {name: value.value for name, value in output.step_output_data.metadata.items()}


def test_paused_events_wait_until_the_job_that_resumes(settings: Settings, topic: str) -> None:
    confirmed = launched(settings, "outbox_pause")
    assert confirmed["done"] == "the outbox is paused: events wait until it is resumed"
    assert confirmed["paused_shards"] == "shard 0"
    insert(settings, topic, [("k", "1")])
    with Harvester(settings):
        eventually(lambda: read_status(settings).shards[0].leader, 30)
        assert launched(settings, "outbox_pause", shard=0)["backlog"] == 1
        assert backlog(settings) == 1
        assert launched(settings, "outbox_resume")["paused_shards"] == "none"
        drained(settings)


def test_a_job_that_cannot_be_carried_out_fails_and_says_why(settings: Settings, unmigrated: Settings) -> None:
    assert launched(settings, "outbox_pause", shard=7) == {
        "failed": "there is no shard 7: outbox has 1, counted from 0"
    }
    assert read_status(settings).shards[0].paused is False
    said = launched(settings, "outbox_replay", since="yesterday")["failed"]
    assert said == "since: expected a time such as 2026-01-31T12:00+00:00 (given: 'yesterday')"
    away = settings.model_copy(update={"dsn": type(settings.dsn)("postgresql://127.0.0.1:1/shop")})
    assert "as OUTBOX_DSN names it" in launched(away, "outbox_pause")["failed"]


def test_parked_keys_are_released(settings: Settings, topic: str) -> None:
    insert(settings, topic, [("bad", TOO_LARGE), ("bad", "2"), ("good", "1")])
    with Harvester(settings):
        eventually(lambda: read_status(settings).parked_keys == 1, 60)
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("UPDATE outbox SET kafka_value = '1' WHERE length(kafka_value) > 10")
        confirmed = launched(settings, "outbox_release_parked", topic=topic, key="bad")
        assert (confirmed["count"], confirmed["parked_keys"]) == (1, 0)
        drained(settings)
    assert by_key(consume(settings, topic)) == {"bad": ["1", "2"], "good": ["1"]}


def test_dead_letters_are_retried(settings: Settings, topic: str) -> None:
    either = settings.model_copy(update={"bad_rows": "dead-letter"})
    insert(either, topic, [("bad", TOO_LARGE), ("good", "1")])
    with Harvester(either):
        eventually(lambda: read_status(either).dead_letters == 1 and backlog(either) == 0, 60)
    [letter] = operate.dead_letters(either)
    assert launched(settings, "outbox_retry_dead_letters", ids=[letter.id + 1])["count"] == 0
    confirmed = launched(settings, "outbox_retry_dead_letters", ids=[letter.id])
    assert (confirmed["count"], confirmed["dead_letters"], confirmed["backlog"]) == (1, 0, 1)


def test_kept_events_are_emitted_again(settings: Settings, topic: str) -> None:
    keeping = settings.model_copy(update={"retention": timedelta(days=1)})
    assert "OUTBOX_RETENTION" in launched(settings, "outbox_replay", topic=topic)["done"]
    insert(keeping, topic, [("a", "1"), ("b", "2")])
    with Harvester(keeping):
        drained(keeping)
        confirmed = launched(settings, "outbox_replay", topic=topic, key="a", since="2020-01-01T00:00+00:00")
        assert confirmed["count"] == 1
        drained(keeping)
    assert by_key(consume(settings, topic)) == {"a": ["1", "1"], "b": ["2"]}


def test_the_launchpad_starts_from_what_dagster_accepts_and_shows_no_secret() -> None:
    """With all defaults, from which it would start otherwise, it has asterisks for secrets, and a run takes them."""
    outbox = OutboxResource(dsn="postgresql://app:secret@db/shop", bootstrap_servers="kafka:9092")
    for job in build_outbox_jobs():
        definition = Definitions(jobs=[job], resources={"outbox": outbox}).resolve_job_def(job.name)
        shown = definition.run_config
        assert shown is not None
        assert "resources" not in shown
        checked = process_config(definition.run_config_schema.config_type, shown)
        assert checked.success, checked.errors


def test_asterisks_in_the_place_of_a_secret_are_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidSetting, match="delete `resources` from the run's configuration"):
        OutboxResource(dsn="********", bootstrap_servers="kafka:9092").settings()
