"""A key that is bytes lands on the partition where Java's clients would put it: their own partitioner is asked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
from py4j.java_gateway import JavaGateway

from outbox_plugin import Event, Harvester, Settings
from outbox_plugin.embedded.jars import kafka_jars
from outbox_plugin.embedded.java import java_home
from tests.harvesting import create_topic, drained
from tests.integration.test_whole_records import emit, records

pytestmark = pytest.mark.integration

PARTITIONS = 7


@pytest.fixture
def java() -> Iterator[JavaGateway]:
    """A Java that has Kafka's clients."""
    [bridge] = (Path(pyspark.__file__).parent / "jars").glob("py4j-*.jar")
    gateway = JavaGateway.launch_gateway(
        jarpath=str(bridge),
        classpath=f"{kafka_jars(lambda _: None)}/*",
        java_path=str(java_home() / "bin" / "java"),
        die_on_exit=True,
    )
    yield gateway
    gateway.shutdown()
    gateway.java_process.stdin.close()
    gateway.java_process.wait(60)


def test_a_thousand_random_keys(settings: Settings, group: str, java: JavaGateway) -> None:
    dice = random.Random(19)
    keys = [b"", b"\x00", *(dice.randbytes(dice.randrange(1, 80)) for _ in range(998))]
    topic = create_topic(settings, f"{group}-seven", PARTITIONS)
    emit(settings, *(Event(topic=topic, key=key, value=None) for key in keys))
    with Harvester(settings):
        drained(settings)
    partitioner = java.jvm.org.apache.kafka.clients.producer.internals.BuiltInPartitioner
    expected = {key: partitioner.partitionForKey(key, PARTITIONS) for key in keys}
    assert len(set(expected.values())) == PARTITIONS
    assert {each.key or b"": each.partition for each in records(settings, topic)} == expected
