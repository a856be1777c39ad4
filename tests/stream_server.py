"""A server of asyncio's streams on a thread of its own, which leaves no socket open when it stops."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class StreamServer(ABC):
    """Listens on `port` of 127.0.0.1, and calls `serve` for each connection."""

    def __init__(self, port: int = 0, *, buffer_bytes: int = 2**16) -> None:
        """Port 0 chooses a free one; `port` has its number once the server runs."""
        self.port = port
        self._buffer_bytes = buffer_bytes
        # The transport of TLS lets go of its socket's transport when it is closed twice: so both are kept.
        self._connections: list[tuple[asyncio.StreamWriter, asyncio.WriteTransport]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client. The connection is closed afterwards."""

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Serve for as long as the body runs."""
        self.loop = asyncio.new_event_loop()
        listening = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(listening,), name="stream-server", daemon=True)
        self.thread.start()
        assert listening.wait(90)
        try:
            yield self
        finally:
            self.loop.call_soon_threadsafe(self._end.set)
            self.thread.join()

    async def connect(self, port: int) -> Streams:
        """A connection to a port of 127.0.0.1, closed at the latest when the server stops."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        self._connections.append((writer, writer.transport))
        return reader, writer

    def _run(self, listening: threading.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._listen(listening))

    async def _listen(self, listening: threading.Event) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=self._buffer_bytes)
        self.port = server.sockets[0].getsockname()[1]
        listening.set()
        await self._end.wait()
        for listening_socket in server.sockets:  # It accepts no more. One that is closed would forget those under way.
            self.loop.remove_reader(listening_socket.fileno())
        for _ in range(5):  # Connections that are being accepted come to `_accept`, which ends them.
            await asyncio.sleep(0)
        server.close()
        await self._close_all()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Note the connection before any other step: a task that is cancelled before it begins closes nothing."""
        self._connections.append((writer, writer.transport))
        if self._end.is_set():
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.serve(reader, writer)
        finally:
            writer.close()

    async def _close_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, transport in self._connections:
            transport.abort()  # `close` would wait for a TLS client's close_notify, which may never come.
        await asyncio.sleep(0)  # The loop closes the sockets in its next round.
