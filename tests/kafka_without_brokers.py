"""A stand-in for a broker that was away for so long that it must register again: until then it lists no broker."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress

from tests.stream_server import StreamServer

# Kafka's protocol guide, "Api Keys". The answers below have the forms of these versions.
METADATA, METADATA_VERSION = 3, 8
API_VERSIONS, API_VERSIONS_VERSION = 18, 0
UNKNOWN_TOPIC_OR_PARTITION, UNSUPPORTED_VERSION = 3, 35
_NODE = 1
_NOT_ASKED = -(2**31)  # In place of the operations that a client may do.


class KafkaWithoutBrokers(StreamServer):
    """Knows no topic, and of brokers only itself, while `is_registered`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_registered = True
        self.lists_without_brokers = 0  # How often it has answered with no broker.

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # The client has gone.
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                request = await reader.readexactly(size)
                api, version, correlation, client_id = struct.unpack_from(">hhih", request)
                body = request[10 + max(client_id, 0) :]
                answer = _api_versions(version) if api == API_VERSIONS else self._metadata(body)
                writer.write(struct.pack(">ii", 4 + len(answer), correlation) + answer)
                await writer.drain()

    def _metadata(self, body: bytes) -> bytes:
        brokers, controller = struct.pack(">i", 0), -1
        if self.is_registered:
            brokers = struct.pack(">ii", 1, _NODE) + _text(b"127.0.0.1") + struct.pack(">ih", self.port, -1)
            controller = _NODE
        else:
            self.lists_without_brokers += 1
        (count,), topics, at = struct.unpack_from(">i", body), b"", 4
        for _ in range(max(count, 0)):
            (size,) = struct.unpack_from(">h", body, at)
            at += 2 + size
            topics += struct.pack(">h", UNKNOWN_TOPIC_OR_PARTITION) + _text(body[at - size : at])
            topics += struct.pack(">?ii", False, 0, _NOT_ASKED)
        cluster = _text(b"cluster") + struct.pack(">i", controller)
        return struct.pack(">i", 0) + brokers + cluster + struct.pack(">i", max(count, 0)) + topics + _END


_END = struct.pack(">i", _NOT_ASKED)


def _text(text: bytes) -> bytes:
    return struct.pack(">h", len(text)) + text


def _api_versions(version: int) -> bytes:
    error = 0 if version == API_VERSIONS_VERSION else UNSUPPORTED_VERSION
    known = ((METADATA, METADATA_VERSION), (API_VERSIONS, API_VERSIONS_VERSION))
    return struct.pack(">hi", error, len(known)) + b"".join(
        struct.pack(">hhh", api, 0, latest) for api, latest in known
    )
