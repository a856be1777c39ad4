"""Calls of libraries that may never return: each runs on a thread of its own, and its caller stops waiting in time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Self, TypeVar

MAX_OVERDUE_CALLS = 8  # Each keeps a thread.

T = TypeVar("T")


class CallOverdue(Exception):
    """A call has missed its deadline, or was not made because too many earlier ones have."""


class CallsWithDeadline:
    """Calls to one server.

    A call that misses its deadline goes on without its caller, and what it returns is dropped. While `max_overdue` do
    so, no further one is made, until they have done so for `forgotten_after` seconds.
    """

    def __init__(
        self,
        server: str,
        thread_name: str,
        max_overdue: int = MAX_OVERDUE_CALLS,
        forgotten_after: float = math.inf,
    ) -> None:
        """Nothing is called yet.

        Args:
            server: what is called, for messages.
            thread_name: the name of each call's thread.
            max_overdue: how many calls may be overdue.
            forgotten_after: for how many seconds an overdue call counts. It keeps its thread for longer.
        """
        self._server = server
        self._thread_name = thread_name
        self._max_overdue = max_overdue
        self._forgotten_after = forgotten_after
        self._lock = threading.Lock()
        self._overdue: dict[threading.Thread, float] = {}  # By thread, since when.

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, int, float]]:
        """A copy in another process has no overdue calls."""
        return type(self), (self._server, self._thread_name, self._max_overdue, self._forgotten_after)

    def result(self, call: Callable[[], T], timeout_seconds: float, *, is_limited: bool = True) -> T:
        """Return what the call returns, or raise what it raises.

        Args:
            call: may be made on another thread, in the caller's context.
            timeout_seconds: how long it may take.
            is_limited: whether overdue calls keep it from being made.

        Raises:
            CallOverdue: it took too long, or too many earlier calls do.
        """
        with self._lock:
            counts_since = time.monotonic() - self._forgotten_after
            self._overdue = {
                each: since for each, since in self._overdue.items() if each.is_alive() and since > counts_since
            }
            if is_limited and len(self._overdue) >= self._max_overdue:
                raise CallOverdue(
                    f"{self._server} has not answered {len(self._overdue)} earlier calls, which still wait"
                )
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:  # The caller raises it.
                errors.append(error)

        thread = threading.Thread(target=copy_context().run, args=(run,), name=self._thread_name, daemon=True)
        thread.start()
        thread.join(timeout_seconds)
        if errors:
            raise errors[0]
        if results:
            return results[0]
        with self._lock:
            self._overdue[thread] = time.monotonic()
        raise CallOverdue(f"{self._server} did not answer within {timeout_seconds:g} seconds")
