"""A proxy that knows Kafka's frames: it can hold a request back, break its connection, and deliver the request late."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from outbox_plugin.embedded.kafka import EmbeddedKafka
from outbox_plugin.embedded.ports import free_port

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


@dataclass
class KafkaProxy:
    """Forwards connections from `port` to `target` on a thread of its own; both on 127.0.0.1."""

    port: int
    target: int
    hold: Hold = lambda _api, _body: False
    held: list[Held] = field(default_factory=list)
    forwarded: list[int] = field(default_factory=list)  # API keys, in the order in which requests went on.

    @contextmanager
    def running(self) -> Iterator[KafkaProxy]:
        """Forward for as long as the body runs."""
        self._loop = asyncio.new_event_loop()
        listening = threading.Event()
        self._thread = thread = threading.Thread(target=self._run, args=(listening,), name="kafka-proxy", daemon=True)
        thread.start()
        assert listening.wait(90)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._end.set)
            thread.join(10)

    def _run(self, listening: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(listening))
        self._loop.close()

    async def _serve(self, listening: threading.Event) -> None:
        self._end = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        server = await asyncio.start_server(self._connect, "127.0.0.1", self.port, limit=2**27)
        listening.set()
        await self._end.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self.target)
                self._writers.add(upstream)
                answers = asyncio.create_task(self._answer(upstream_reader, writer))
                self._tasks.add(answers)
                try:
                    kept = await self._forward(reader, upstream)
                finally:
                    writer.close()
                    answers.cancel()
                if not kept:
                    upstream.close()
        finally:
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter) -> bool:
        """Pass requests on; returns whether one was held, so that the connection to the broker is still needed."""
        while True:
            head = await reader.readexactly(4)
            body = await reader.readexactly(struct.unpack(">i", head)[0])
            api = struct.unpack(">h", body[:2])[0]
            if self.hold(api, body):
                self.held.append(Held(api, head + body, upstream))
                return True
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
        """Let everything that is held arrive now; may be called by `hold`, and from any thread."""
        held, self.held = self.held, []
        for each in held:
            if threading.current_thread() is self._thread:
                each.upstream.write(each.frame)
            else:
                self._loop.call_soon_threadsafe(each.upstream.write, each.frame)


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
