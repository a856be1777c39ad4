"""Calls to servers that may never answer, with a deadline that holds whatever a client library does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from outbox_plugin.errors import OutboxError

_Result = TypeVar("_Result")


class DeadlineFuture(Generic[_Result]):
    """A call on a thread of its own, because a client library's time-outs cannot be relied upon."""

    def __init__(self, call: Callable[[], _Result]) -> None:
        self._call = call
        self._result: _Result | None = None
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="outbox-status", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except OutboxError as error:
            self._error = str(error)
        except Exception as error:  # Nobody joins this thread for its traceback: without this, all would seem well.
            self._error = f"unexpected: {error!r}"

    def result(self, deadline: float, server: str) -> tuple[_Result | None, str | None]:
        """The call's result and None; or None and what is wrong.

        Args:
            deadline: of `time.monotonic()`, in seconds.
            server: the name of what is called, for the message.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            return None, f"{server} did not answer in time"
        return self._result, self._error
