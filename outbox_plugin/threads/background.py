"""A service that runs on its own thread between a start and a stop."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Self

from outbox_plugin.errors import UserError
from outbox_plugin.log_tenant import of_same_tenant
from outbox_plugin.printable import logger_of

logger = logger_of(__name__)

POLL_SECONDS = 0.2  # How often to look whether a service is to stop.


class Background(ABC):
    """A background service. Start and stop it by `start` and `stop`, `with`, `async with`, or `run`."""

    def __init__(self, name: str) -> None:
        """Make the service. It opens no connection yet. `name` is its name in the log."""
        self._name = name
        self._stop = threading.Event()
        self._starting = threading.RLock()  # Held during a start, so that a stop on another thread comes after it.
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @abstractmethod
    def _prepare(self, loop: asyncio.AbstractEventLoop | None) -> Callable[[], None]:
        """Check both servers, on the caller's thread. Returns what the service's thread runs until `_stop` is set.

        `loop` is the event loop of `async with`, if that starts it.

        Raises:
            UserError: a setting, a server or the schema is not as it must be; nothing has been touched.
        """

    def start(self) -> None:
        """Check both servers and their tables and topics, then run in the background.

        Does nothing if it was started or stopped before.

        Raises:
            UserError: a setting, a server or the schema is not as it must be; nothing has been touched.
        """
        self._start(None)

    def stop(self) -> None:
        """Finish the work under way, and end. Returns when everything is closed.

        It may be called twice, or without a start.
        """
        self._stop.set()
        with self._starting:
            thread = self._thread
        if thread is not None:
            thread.join()

    def run(self, stop: threading.Event) -> None:
        """Start, run until `stop` is set, then stop. The handler of a signal may set it.

        Raises:
            UserError: a setting, a server or the schema is not as it must be; nothing has been touched.
            OutboxError: the error that made it end by itself.
        """
        run_together([self], stop)

    @property
    def error(self) -> BaseException | None:
        """The error that made it end by itself; None if there is none."""
        return self._error

    @property
    def alive(self) -> bool:
        """Whether it runs. False before the start, after the stop, and after it has ended by itself."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._start, loop)
        except asyncio.CancelledError:
            # A start cannot be cancelled on its thread. So `stop` waits for its end, on another thread.
            self._stop.set()
            loop.run_in_executor(None, self.stop)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def _start(self, loop: asyncio.AbstractEventLoop | None) -> None:
        with self._starting:
            if self._thread is not None or self._stop.is_set():
                return
            live = self._prepare(loop)
            self._thread = threading.Thread(
                target=of_same_tenant(partial(self._live, live)), name=f"outbox-{self._name}", daemon=True
            )
            self._thread.start()

    def _live(self, live: Callable[[], None]) -> None:
        try:
            live()
        except BaseException as error:
            self._error = error
            logger.error("the %s ends: %s", self._name, error)


def run_together(all_of_them: Sequence[Background], stop: threading.Event) -> None:
    """Run services until `stop` is set, or one of them has ended by itself; then stop all.

    A start that waits for somebody else gives up once `stop` is set. A signal's handler may set `stop`: the event is
    looked at, and not waited for, because whoever waits holds its lock, and the handler runs on the same thread.

    Raises:
        UserError: one could not start: a setting, a server or the schema is not as it must be.
        OutboxError: the error that made one end by itself.
    """
    try:
        with _passed_on(stop, all_of_them):
            for each in all_of_them:
                each.start()
        while not stop.is_set() and all(each.alive for each in all_of_them):
            time.sleep(POLL_SECONDS)
    except UserError as error:
        if not stop.is_set():
            raise
        logger.info("stopped at the start: %s", error)
    finally:
        for each in all_of_them:
            each.stop()
    for each in all_of_them:
        if each.error is not None:
            raise each.error


@contextmanager
def _passed_on(stop: threading.Event, services: Sequence[Background]) -> Iterator[None]:
    """Let the services know of `stop` while they start: this thread is busy with that."""
    have_started = threading.Event()

    def pass_on() -> None:
        while not have_started.wait(POLL_SECONDS):
            if stop.is_set():
                for each in services:
                    each._stop.set()
                return

    threading.Thread(target=pass_on, name="outbox-stop", daemon=True).start()
    try:
        yield
    finally:
        have_started.set()
