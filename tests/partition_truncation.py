"""Cuts the end off a partition, as an unclean election of a leader does, or a loss of power before a flush."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from confluent_kafka import Producer

from outbox_plugin.embedded.kafka import EmbeddedKafka

_BATCH_PREFIX = 12  # A batch begins with its first offset (8 bytes), and the number of the bytes that follow (4 bytes).


class KafkaToCut(EmbeddedKafka):
    """A broker that is killed and started again. By default, it waits for nine seconds before it registers again."""

    def properties(self, port: int, data: str) -> str:
        return super().properties(port, data) + "broker.session.timeout.ms=3000\nbroker.heartbeat.interval.ms=500\n"


def append(servers: str, topic: str, values: list[str], *, named: bool = True) -> None:
    """Write records to partition 0, each in a batch of its own; `named` gives them idempotency keys."""
    with closing(Producer({"bootstrap.servers": servers, "enable.idempotence": True})) as producer:
        for value in values:
            headers: list[tuple[str, str | bytes | None]] = [("idempotency-key", value.encode())] if named else []
            producer.produce(topic, value, value, partition=0, headers=headers)
            assert producer.flush(60) == 0


def cut(kafka: EmbeddedKafka, topic: str, end: int) -> None:
    """Kill the broker, cut partition 0 of a topic at the offset `end`, and start the broker: a new epoch begins."""
    kafka.kill()
    cut_and_launch(kafka, topic, end)


def cut_and_launch(kafka: EmbeddedKafka, topic: str, end: int) -> None:
    """Do the same for a broker that was killed before."""
    folder = kafka.folder / "data" / f"{topic}-0"
    for index in [*folder.glob("*.index"), *folder.glob("*.timeindex"), *folder.glob("*.snapshot")]:
        index.unlink()
    log = folder / f"{0:020}.log"
    log.write_bytes(_until(log, end))
    kafka.launch()
    kafka.wait()


def numbered(word: str, first: int, last: int) -> list[str]:
    """Values of records, such as "old 07"."""
    return [f"{word} {number:02}" for number in range(first, last)]


def replace_end(kafka: EmbeddedKafka, topic: str, end: int, last: int) -> None:
    """Cut partition 0 at the offset `end`, and write new records up to the offset `last`."""
    cut(kafka, topic, end)
    append(kafka.bootstrap_servers, topic, numbered("new", end, last))


def _until(log: Path, end: int) -> bytes:
    content, at = log.read_bytes(), 0
    while at < len(content) and int.from_bytes(content[at : at + 8], "big") < end:
        at += _BATCH_PREFIX + int.from_bytes(content[at + 8 : at + _BATCH_PREFIX], "big")
    return content[:at]
