"""Records that others write to the leader topic and the progress topic."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from confluent_kafka import Producer

from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.settings import Settings
from outbox_plugin.status.reader import read_status
from tests.harvesting import (
    assert_exactly_once_in_order,
    consume,
    drained,
    environment,
    harvesters,
    insert_numbered,
    run_outbox,
)
from tests.integration.test_hostile_records import changes_no_leader, everybody_listens
from tests.support import eventually

pytestmark = pytest.mark.integration

MALFORMED = [
    b"",
    b"null",
    b"[" * 100_000,
    b'{"shard": [], "phase": "leader", "leader_id": [], "instance": 0, "host": 0, "pid": 0, "since": 0, '
    b'"incarnation": 0, "place": 0}',
    b'{"phase": "leader", "shard": 0, "layout": "x", "place": "\\ud800"}',
    b"\xff\xfe\x00",
    b"1" * 10_000,
]


def write(settings: Settings, topic: str, key: bytes | None, bodies: list[bytes], headers: dict[str, bytes]) -> None:
    """As anybody may who is let write to the topic."""
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
    for body in bodies:
        producer.produce(topic, key=key, value=body, partition=0, headers=list(headers.items()))
    assert producer.flush(20) == 0
    producer.close()


def test_malformed_heartbeats_disturb_no_harvester_and_are_told(settings: Settings, topic: str, tmp_path: Path) -> None:
    names = KafkaNames.of(settings)
    told: list[CompletedProcess[str]] = []

    def disturb() -> None:
        write(settings, names.leader_topic, None, MALFORMED, {})
        told.append(run_outbox("status", "--json", env=environment(settings)))
        insert_numbered(settings, topic, (len(told) - 1) * 100, 100)
        drained(settings)

    with harvesters(settings, tmp_path, 2) as pair:
        eventually(lambda: any(each.leads() for each in pair), 60)
        everybody_listens(settings, 2)
        assert changes_no_leader(pair, disturb)
        assert [each.alive for each in pair] == [True, True]
        eventually(lambda: read_status(settings).shards[0].leader, 30)
    done = told[0]
    [shard] = json.loads(done.stdout)["shards"]
    assert shard["ignored_records"] == len(MALFORMED)
    assert f"{len(MALFORMED)} records of the last minute on the leader topic are ignored" in shard["trouble"]
    assert done.returncode == 1
    assert_exactly_once_in_order(consume(settings, topic), 0, len(told) * 100)
