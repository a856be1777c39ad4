"""What runs on a thread of its own between a start and a stop: its life, as a caller sees it."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from outbox_plugin.printable import logger_of

logger = logger_of(__name__)


class Background(ABC):
    """Started and stopped by hand, by `with`, by `async with`, or by `run`."""

    def __init__(self, name: str) -> None:
        """Nothing is connected yet. `name` says in the log what it is."""
        self._name = name
        self._stop = threading.Event()
        self._starting = threading.RLock()  # Held during a start, so that a stop on another thread comes after it.
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @abstractmethod
    def _prepare(self, loop: asyncio.AbstractEventLoop | None) -> Callable[[], None]:
        """Check both servers, on the caller's thread; returns what its own is to do until `_stop` is set.

        `loop` is the event loop of `async with`.

        Raises:
            UserError: a setting, a server or the schema is not as it must be; nothing has been touched.
        """

    def start(self) -> None:
        """Check both servers and what is in them, then go on in the background.

        Does nothing if it has been started or stopped before.

        Raises:
            UserError: a setting, a server or the schema is not as it must be; nothing has been touched.
        """
        self._start(None)

    def stop(self) -> None:
        """Finish what is under way, and end; returns when everything is closed. Safe to call twice, or unstarted."""
        self._stop.set()
        with self._starting:
            thread = self._thread
        if thread is not None:
            thread.join()

    def run(self, stop: threading.Event) -> None:
        """Start, and go on until `stop` is set; then end.

        Raises:
            UserError: see `start`.
            OutboxError: what made it end by itself.
        """
        run_together([self], stop)

    @property
    def error(self) -> BaseException | None:
        """What made it end by itself; None if nothing did."""
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
            # A start cannot be cancelled on its thread. `stop` waits for its end, on another one.
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
            self._thread = threading.Thread(target=self._live, args=(live,), name=f"outbox-{self._name}", daemon=True)
            self._thread.start()

    def _live(self, live: Callable[[], None]) -> None:
        try:
            live()
        except BaseException as error:
            self._error = error
            logger.error("the %s ends: %s", self._name, error)


def run_together(all_of_them: Sequence[Background], stop: threading.Event) -> None:
    """Run them until `stop` is set, or one of them has ended by itself; then stop all.

    Raises:
        UserError: see `Background.start`.
        OutboxError: what made one end by itself.
    """
    try:
        for each in all_of_them:
            each.start()
        while not stop.wait(0.2) and all(each.alive for each in all_of_them):
            pass
    finally:
        for each in all_of_them:
            each.stop()
    for each in all_of_them:
        if each.error is not None:
            raise each.error
