"""A proxy that knows Kafka's frames: it can hold a request back, break its connection, and deliver the request late."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.kafka import EmbeddedKafka
from tests.stream_server import StreamServer

# Kafka's protocol guide, "Api Keys".
PRODUCE, INIT_PRODUCER_ID, ADD_PARTITIONS, END_TXN = 0, 22, 24, 26
NAMES = {
    PRODUCE: "Produce",
    INIT_PRODUCER_ID: "InitProducerId",
    ADD_PARTITIONS: "AddPartitionsToTxn",
    END_TXN: "EndTxn",
}
_CHUNK = 65_536


@dataclass
class Held:
    """A request that the proxy keeps, and the connection to the broker on which it is to arrive."""

    api: int
    frame: bytes
    upstream: asyncio.StreamWriter


# Sees every request before it goes on: (API key, its bytes). Returns whether to hold it and break its connection.
Hold = Callable[[int, bytes], bool]


class KafkaProxy(StreamServer):
    """Forwards connections from `port` to `target` on a thread of its own; both on 127.0.0.1."""

    def __init__(self, port: int, target: int) -> None:
        super().__init__(port, buffer_bytes=2**27)
        self.target = target
        self.hold: Hold = lambda _api, _body: False
        self.held: list[Held] = []
        self.forwarded: list[int] = []  # API keys, in the order in which requests were forwarded.

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            upstream_reader, upstream = await self.connect(self.target)
            answers = asyncio.create_task(self._answer(upstream_reader, writer))
            try:
                await self._forward_until_held(reader, upstream)
            except (OSError, asyncio.IncompleteReadError):  # One side has closed its connection.
                upstream.close()
            finally:
                answers.cancel()

    async def _forward_until_held(self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter) -> None:
        """Pass requests on until one is held; the connection to the broker stays open for it."""
        while True:
            head = await reader.readexactly(4)
            body = await reader.readexactly(struct.unpack(">i", head)[0])
            api = struct.unpack(">h", body[:2])[0]
            if self.hold(api, body):
                self.held.append(Held(api, head + body, upstream))
                return
            upstream.write(head + body)
            await upstream.drain()
            self.forwarded.append(api)

    @staticmethod
    async def _answer(upstream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await upstream.read(_CHUNK):
                writer.write(chunk)
                await writer.drain()

    def release(self) -> None:
        """Deliver all held requests now. `hold` may call it, and so may any thread."""
        held, self.held = self.held, []
        for each in held:
            if threading.current_thread() is self.thread:
                each.upstream.write(each.frame)
            else:
                self.loop.call_soon_threadsafe(each.upstream.write, each.frame)


class ProxiedKafka(EmbeddedKafka):
    """A broker with a second listener, whose clients are told to reach it through a proxy at `proxy_port`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, print)
        self.behind_proxy = free_port()
        self.proxy_port = free_port()

    def properties(self, port: int, data: str) -> str:
        """As of an embedded broker, with the second listener."""
        lines = super().properties(port, data).splitlines()
        listener = f",PROXIED://127.0.0.1:{self.behind_proxy}"
        advertised = f",PROXIED://127.0.0.1:{self.proxy_port}"
        added = {"listeners=": listener, "advertised.listeners=": advertised}
        mapped = "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,PROXIED:PLAINTEXT"
        named = "inter.broker.listener.name=PLAINTEXT"
        changed = [line + next((more for key, more in added.items() if line.startswith(key)), "") for line in lines]
        return "\n".join([*changed, mapped, named, ""])

    def proxy(self) -> KafkaProxy:
        """A proxy in front of the second listener."""
        return KafkaProxy(self.proxy_port, self.behind_proxy)
