"""A TCP proxy on 127.0.0.1 that can cut, hold, discard and half-close the connections that pass through it.

What the states stand for in a real network:

    cut          a firewall or a load balancer resets all connections
    hold         a stalled path: bytes are accepted and arrive much later, also when nobody waits for them any more
    discard      packets of one direction are gone: nothing arrives; the connection is reset when the path is back
    half-open    the server side has ended, and the client is not told
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

Direction = Literal["to server", "to client"]
DIRECTIONS: tuple[Direction, Direction] = ("to server", "to client")
_BYTES = 65_536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_Result = TypeVar("_Result")


class Proxy:
    """Forwards connections from `port`, which stays the same, to `target`, a port of this machine that may change.

    Its methods may be called from any thread. Existing connections stay with the target that they were opened to.

    Example:
        with Proxy(postgres.port) as proxy:
            proxy.hold("to client")
            ...
            proxy.restore()
    """

    def __init__(self, target: int | None = None) -> None:
        """Nothing listens yet. Without a `target`, set one before the first connection."""
        self.target = target or 0
        self.port = 0  # Known from `start` on.
        self._passing: dict[Direction, asyncio.Event] = {}
        self._discarding: set[Direction] = set()
        self._links: set[_Link] = set()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-proxy", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Listen on a free port, which is the proxy's until `stop`."""
        self._listening_socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listening_socket.getsockname()[1]
        self._listening_socket.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        self._listening.wait()

    def stop(self) -> None:
        """Reset all connections and listen no more; safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    @property
    def connections(self) -> int:
        """How many connections are open on the client's side."""
        return self._in_loop(lambda: len(self._links))

    def cut(self) -> None:
        """Reset all connections, on both sides; new ones are accepted."""
        self._in_loop(self._cut)

    def hold(self, *directions: Direction) -> None:
        """Forward nothing in these directions until `restore`, also of new connections; then it is all delivered."""
        self._in_loop(lambda: self._hold(directions))

    def discard(self, *directions: Direction) -> None:
        """Swallow what goes in these directions until `restore`, which resets the connections that lost something."""
        self._in_loop(lambda: self._discarding.update(directions))

    def half_open(self) -> None:
        """End the server's side of all connections; the client's side stays open and silent until `restore`."""
        self._in_loop(self._half_open)

    def restore(self) -> None:
        """Let everything pass again."""
        self._in_loop(self._restore)

    def _in_loop(self, action: Callable[[], _Result]) -> _Result:
        async def act() -> _Result:
            return action()

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result()

    def _cut(self) -> None:
        for link in list(self._links):
            link.reset()

    def _hold(self, directions: Iterable[Direction]) -> None:
        for direction in directions:
            self._passing[direction].clear()

    def _half_open(self) -> None:
        for link in self._links:
            link.leave_half_open()

    def _restore(self) -> None:
        for link in list(self._links):
            if link.is_damaged:
                link.reset()
        self._discarding.clear()
        for event in self._passing.values():
            event.set()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with self._listening_socket:
                self._passing = {each: asyncio.Event() for each in DIRECTIONS}
                self._restore()
                self._loop.add_reader(self._listening_socket, self._accept)
                self._loop.call_soon(self._listening.set)
                self._loop.run_forever()
                self._loop.remove_reader(self._listening_socket)
            self._cut()
            self._loop.run_until_complete(_ended(asyncio.all_tasks(self._loop)))
        finally:
            self._loop.close()

    def _accept(self) -> None:
        """Take a connection that has come. In one step: a task that is cancelled half-way would forget its socket."""
        with suppress(BlockingIOError, ConnectionAbortedError):
            client, _ = self._listening_socket.accept()
            link = _Link(client)
            self._links.add(link)
            link.task = self._loop.create_task(self._serve(link))
            link.task.add_done_callback(lambda task: self._close(link, task))

    def _close(self, link: _Link, task: asyncio.Task[None]) -> None:
        """Its task has ended; one that was cancelled before it began has run nothing of its own."""
        if task.cancelled():
            link.reset_on_close()
        self._links.discard(link)
        link.close()

    async def _serve(self, link: _Link) -> None:
        try:
            await self._loop.sock_connect(link.server, ("127.0.0.1", self.target))
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(link, link.client, link.server, "to server"))
                both.create_task(self._pump(link, link.server, link.client, "to client"))
            if link.is_damaged:  # The client waits on a silent connection, until `restore` resets it.
                await asyncio.Event().wait()
        except* (OSError, asyncio.CancelledError):
            link.reset_on_close()

    async def _pump(self, link: _Link, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        while True:
            data = await self._loop.sock_recv(source, _BYTES)
            await self._passing[direction].wait()
            if direction in self._discarding or link.is_half_open:
                link.is_damaged = True
            elif data:
                await self._loop.sock_sendall(sink, data)
            else:
                with suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)
            if not data:
                return


class _Link:
    """A connection from a client, and the one to the server that belongs to it."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.server = socket.socket()
        self.task: asyncio.Task[None] | None = None
        self.is_damaged = False  # Something is missing in it, so it cannot go on.
        self.is_half_open = False
        for each in (self.client, self.server):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def reset(self) -> None:
        """End it as a reset by peer, on both sides."""
        if self.task is not None:
            self.task.cancel()

    def leave_half_open(self) -> None:
        """End the server's side."""
        self.is_half_open = self.is_damaged = True
        with suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)

    def reset_on_close(self) -> None:
        """Let `close` end it as a reset."""
        for each in (self.client, self.server):
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)

    def close(self) -> None:
        self.client.close()
        self.server.close()


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    others = tasks - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
