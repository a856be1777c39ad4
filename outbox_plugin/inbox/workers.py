"""Where handlers run: each on a thread of its own, or as tasks of one event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from outbox_plugin.inbox.dispatcher import Dispatcher
from outbox_plugin.inbox.handling import Handling
from outbox_plugin.inbox.session import HandlerSession, driven


class ThreadWorkers:
    """Sync handlers: one thread and one connection each. `error`: what ended one of them, which nothing should."""

    def __init__(
        self, dispatcher: Dispatcher, handling: Handling, make: Callable[[], HandlerSession], count: int
    ) -> None:
        self.error: BaseException | None = None
        self._dispatcher = dispatcher
        self._handling = handling
        self._threads = [
            threading.Thread(target=self._work, args=(make(),), name=f"outbox-inbox-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        """Start all threads."""
        for thread in self._threads:
            thread.start()

    def _work(self, session: HandlerSession) -> None:
        try:
            while (batches := self._dispatcher.wait_and_take()) is not None:
                began = time.monotonic()
                handled = driven(self._handling.handle(session, batches))
                self._dispatcher.finish(batches, handled, time.monotonic() - began)
        except BaseException as error:
            self.error = error
        finally:
            driven(session.close())

    def join(self) -> None:
        """Wait until all handlers have ended; the dispatcher must have been stopped."""
        for thread in self._threads:
            thread.join()


class TaskWorkers:
    """Async handlers: one task and one connection each, in a loop that is given, or in one of their own.

    `error`: what ended one of them; nothing should but the end of the loop.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        handling: Handling,
        make: Callable[[], HandlerSession],
        count: int,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self.error: BaseException | None = None
        self._dispatcher = dispatcher
        self._handling = handling
        self._make = make
        self._count = count
        self._given = loop
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start all tasks."""
        if self._given is not None:
            asyncio.run_coroutine_threadsafe(self._work_all(), self._given)
        else:
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._work_all()), name="outbox-inbox-loop", daemon=True
            )
            self._thread.start()

    async def _work_all(self) -> None:
        loop = asyncio.get_running_loop()
        wanted = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
                loop.call_soon_threadsafe(wanted.set)

        self._dispatcher.on_change(wake)
        try:
            work = (self._work(self._make(), wanted) for _ in range(self._count))
            await asyncio.gather(*work, return_exceptions=True)
        finally:
            self._ended.set()

    async def _work(self, session: HandlerSession, wanted: asyncio.Event) -> None:
        try:
            while True:
                wanted.clear()
                batches, again_in = self._dispatcher.take()
                if batches is None:
                    return
                if not batches:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(wanted.wait(), again_in)
                    continue
                began = time.monotonic()
                handled = await self._handling.handle(session, batches)
                self._dispatcher.finish(batches, handled, time.monotonic() - began)
        except BaseException as error:
            self.error = error
            raise
        finally:
            await session.close()

    def join(self) -> None:
        """Wait until all handlers have ended; the dispatcher must have been stopped. Not in the handlers' own loop."""
        self._ended.wait()
        if self._thread is not None:
            self._thread.join()
