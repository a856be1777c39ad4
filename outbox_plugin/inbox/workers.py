"""Workers take records from the dispatcher and run handlers: threads, or tasks of one event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

from outbox_plugin.inbox.dispatcher import Dispatcher
from outbox_plugin.inbox.handling import Handling
from outbox_plugin.inbox.session import (
    AsyncBatchHandler,
    AsyncHandler,
    BatchHandler,
    Handler,
    HandlerSession,
    TaskSession,
    ThreadSession,
    driven,
)
from outbox_plugin.settings import Settings


def make_workers(
    settings: Settings,
    dispatcher: Dispatcher,
    handling: Handling,
    handler: Handler | AsyncHandler | BatchHandler | AsyncBatchHandler,
    count: int,
    loop: asyncio.AbstractEventLoop | None,
    *,
    traced: Callable[[HandlerSession], HandlerSession],
) -> ThreadWorkers | TaskWorkers:
    """Make the workers of a handler: tasks for an async one, threads for another.

    Args:
        settings: which Postgres.
        dispatcher: hands out events.
        handling: handles an event, or a batch.
        handler: the user's.
        count: how many workers.
        loop: for an async handler, the event loop; None for a new one.
        traced: makes a session trace its handler, or leaves it as it is.
    """
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None)):  # noqa: B004
        awaited = cast(Callable[[Any, Any], Awaitable[None]], handler)
        return TaskWorkers(dispatcher, handling, lambda: traced(TaskSession(settings, awaited)), count, loop)
    called = cast(Callable[[Any, Any], None], handler)
    return ThreadWorkers(dispatcher, handling, lambda: traced(ThreadSession(settings, called)), count)


class ThreadWorkers:
    """Threads for a sync handler, with a connection each.

    Args:
        dispatcher: hands out events.
        handling: handles an event, or a batch.
        make: makes a session, with a connection.
        count: how many threads.

    Attributes:
        error: the exception that ended a thread, which nothing should do; None while all run.
    """

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
                result = driven(self._handling.handle(session, batches))
                self._dispatcher.finish(batches, result, time.monotonic() - began)
        except BaseException as error:
            self.error = error
        finally:
            driven(session.close())

    def join(self) -> None:
        """Wait for the end of all threads. Stop the dispatcher first."""
        for thread in self._threads:
            thread.join()


class TaskWorkers:
    """Asyncio tasks for an async handler, with a connection each, in a given event loop or a new one.

    Args:
        dispatcher: hands out events.
        handling: handles an event, or a batch.
        make: makes a session, with a connection.
        count: how many tasks.
        loop: the event loop; None for a new one on a thread of its own.

    Attributes:
        error: the exception that ended a task, which only the end of the loop should do; None while all run.
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
        changed = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # The loop is closed, so no task waits.
                loop.call_soon_threadsafe(changed.set)

        self._dispatcher.on_change(wake)
        try:
            work = (self._work(self._make(), changed) for _ in range(self._count))
            await asyncio.gather(*work, return_exceptions=True)
        finally:
            self._ended.set()

    async def _work(self, session: HandlerSession, changed: asyncio.Event) -> None:
        try:
            while True:
                changed.clear()
                batches, again_in = self._dispatcher.take()
                if batches is None:
                    return
                if not batches:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), again_in)
                    continue
                began = time.monotonic()
                result = await self._handling.handle(session, batches)
                self._dispatcher.finish(batches, result, time.monotonic() - began)
        except BaseException as error:
            self.error = error
            raise
        finally:
            await session.close()

    def join(self) -> None:
        """Wait for the end of all tasks. Stop the dispatcher first; do not call this in the tasks' own loop."""
        self._ended.wait()
        if self._thread is not None:
            self._thread.join()
