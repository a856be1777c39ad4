"""Writes records whose header names are not text. confluent_kafka cannot, but librdkafka and other clients can."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import confluent_kafka

from outbox_plugin.settings import Settings

NOT_TEXT = b"\xff\xfename"
_TOPIC, _PARTITION, _VALUE, _KEY, _FLAGS, _HEADER, _END = 1, 3, 4, 5, 7, 9, 0
_COPY, _AS_PRODUCER = 2, 0


def produce_raw(
    settings: Settings, topic: str, value: str, *, key: str = "k", partition: int = 0, name: bytes = NOT_TEXT
) -> None:
    """Write a record with a header of that name, and one that names the event."""
    kafka = _librdkafka()
    said = ctypes.create_string_buffer(512)
    config = kafka.rd_kafka_conf_new()
    servers = settings.bootstrap_servers.encode()
    assert kafka.rd_kafka_conf_set(ctypes.c_void_p(config), b"bootstrap.servers", servers, said, 512) == 0, said.value
    producer = ctypes.c_void_p(kafka.rd_kafka_new(_AS_PRODUCER, ctypes.c_void_p(config), said, ctypes.c_size_t(512)))
    assert producer, said.value
    size = ctypes.c_size_t
    failed = kafka.rd_kafka_producev(
        producer,
        *(_TOPIC, topic.encode(), _PARTITION, ctypes.c_int32(partition)),
        *(_KEY, key.encode(), size(len(key)), _VALUE, value.encode(), size(len(value))),
        *(_HEADER, name, b"v", ctypes.c_ssize_t(1), _HEADER, b"idempotency-key", value.encode(), size(len(value))),
        *(_FLAGS, _COPY, _END),
    )
    assert failed == 0
    assert kafka.rd_kafka_flush(producer, 30_000) == 0
    kafka.rd_kafka_destroy(producer)


def _librdkafka() -> Any:
    """The library that confluent_kafka brings."""
    [path] = (Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs").glob("librdkafka*")
    library = ctypes.CDLL(str(path))
    library.rd_kafka_conf_new.restype = library.rd_kafka_new.restype = ctypes.c_void_p
    return library
