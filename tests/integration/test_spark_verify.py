"""What Spark finds on a topic: one lost, one duplicated or one swapped record, and nothing where all is well."""

from __future__ import annotations

import json

import pytest
from pyspark.sql import SparkSession

from outbox_plugin import Settings
from outbox_plugin.errors import InvalidSetting, ServerRefused
from outbox_plugin.spark import verify
from outbox_plugin.spark.kafka_source import add_packages
from tests.harvesting import environment, run_outbox
from tests.records_to_verify import ALL, EVENTS, KEYS, Planted, plant, plant_moved_key
from tests.spark_support import PACKAGES

pytestmark = [pytest.mark.integration, pytest.mark.spark]


@pytest.fixture
def connected(settings: Settings) -> Settings:
    return settings.model_copy(update={"spark_packages": PACKAGES})


def test_all_is_well(spark: SparkSession, connected: Settings, topic: str) -> None:
    """Records of an aborted transaction are not there for a `read_committed` consumer."""
    plant(connected, topic, [*ALL, *(Planted(place, aborted=True) for place in (1, 5, 7))])
    verdict = verify(spark, connected, [topic])
    assert (verdict.records, verdict.complete, verdict.missing) == (EVENTS, True, 0)
    assert (verdict.unnamed, verdict.unplaced) == (0, 0)


@pytest.mark.parametrize("named", [True, False])
def test_one_duplicated_record_is_found(spark: SparkSession, connected: Settings, topic: str, named: bool) -> None:
    """Also by its place alone; and it is no disorder."""
    plant(connected, topic, [*(Planted(each.place, named) for each in ALL), Planted(7, named)])
    verdict = verify(spark, connected, [topic])
    assert (verdict.records, verdict.duplicates, verdict.order_violations) == (EVENTS + 1, 1, 0)
    assert (verdict.missing, verdict.in_order) == (0, False)
    assert verdict.example_duplicates[0].startswith("event-7 at " if named else "j 7 at ")


@pytest.mark.parametrize("named", [True, False])
def test_a_replay_is_no_duplicate_and_no_disorder(
    spark: SparkSession, connected: Settings, topic: str, named: bool
) -> None:
    """And an event that only a replay has brought is not missing."""
    first = [Planted(each.place, named) for each in ALL if each.place != EVENTS]
    plant(connected, topic, [*first, *(Planted(place, named, replayed=True) for place in (7, 7, 9, EVENTS))])
    verdict = verify(spark, connected, [topic])
    assert (verdict.records, verdict.replayed, verdict.complete) == (EVENTS + 3, 4, True)
    assert (verdict.unnamed, verdict.unplaced, verdict.missing) == (0, 0, 0)


def test_one_swapped_pair_is_found(spark: SparkSession, connected: Settings, topic: str) -> None:
    swapped = [*ALL]
    swapped[100], swapped[100 + KEYS] = swapped[100 + KEYS], swapped[100]
    plant(connected, topic, swapped)
    verdict = verify(spark, connected, [topic])
    assert (verdict.order_violations, verdict.duplicates, verdict.missing) == (1, 0, 0)
    assert verdict.example_violations[0].startswith(f"key key-{101 % KEYS} at {topic}/")


def test_a_key_that_moved_to_another_partition_is_judged_within_each(
    spark: SparkSession, connected: Settings, topic: str
) -> None:
    """Nothing orders the records of two partitions."""
    plant_moved_key(connected, topic)
    verdict = verify(spark, connected, [topic])
    assert (verdict.records, verdict.order_violations) == (4, 1)


@pytest.mark.parametrize("lost", [1, 300, EVENTS])
def test_one_lost_record_is_found(spark: SparkSession, connected: Settings, topic: str, lost: int) -> None:
    """The last one too: the database knows how many there are."""
    plant(connected, topic, [each for each in ALL if each.place != lost])
    verdict = verify(spark, connected, [topic])
    assert (verdict.records, verdict.missing, verdict.example_missing) == (EVENTS - 1, 1, [f"j {lost}"])
    assert (verdict.in_order, verdict.complete) == (True, False)


def test_what_was_expected_by_its_idempotency_key_and_is_not_there(
    spark: SparkSession, connected: Settings, topic: str
) -> None:
    plant(connected, topic, ALL)
    expected = spark.range(1, EVENTS + 2).selectExpr("concat('event-', id) AS idempotency_key")
    verdict = verify(spark, connected, [topic], expected=expected)
    assert (verdict.missing, verdict.example_missing) == (1, [f"event-{EVENTS + 1}"])


def test_only_the_job_that_is_asked_for_is_judged(spark: SparkSession, connected: Settings, topic: str) -> None:
    plant(connected, topic, ALL[:-1], job="bad")
    plant(connected, topic, ALL, job="good")
    unnamed = [each._replace(named=False) for each in ALL]
    assert verify(spark, connected, [topic], job="good").records == len(unnamed)
    assert verify(spark, connected, [topic], job="good").complete
    assert verify(spark, connected, [topic], job="bad").missing == 1


def test_a_topic_that_is_not_there_is_said(spark: SparkSession, connected: Settings) -> None:
    with pytest.raises(ServerRefused, match="Spark cannot read not-there of"):
        verify(spark, connected, ["not-there"])


def test_a_package_that_is_not_to_be_had_is_said(spark: SparkSession) -> None:
    with pytest.raises(InvalidSetting, match="OUTBOX_SPARK_PACKAGES: expected group:name:version"):
        add_packages(spark, "nonsense")
    with pytest.raises(InvalidSetting, match=r"no.such:package:1 cannot be downloaded: .*not found"):
        add_packages(spark, "no.such:package:1")


@pytest.mark.slow
def test_the_command_says_what_is_wrong_and_ends_with_1(connected: Settings, topic: str) -> None:
    plant(connected, topic, ALL[1:])
    env = {**environment(connected), "OUTBOX_SPARK_PACKAGES": PACKAGES}
    done = run_outbox("verify", topic, "--json", "--master", "local[2]", env=env, seconds=240)
    assert done.returncode == 1, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert (said["records"], said["missing"], said["complete"]) == (EVENTS - 1, 1, False)
