"""Calls servers with a deadline that holds even if the client library never returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from outbox_plugin.errors import OutboxError

_Result = TypeVar("_Result")


class DeadlineFuture(Generic[_Result]):
    """A call on its own thread, because the time-outs of client libraries are not reliable."""

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
        except Exception as error:  # Otherwise the error would be lost with the thread.
            self._error = f"unexpected: {error!r}"

    def result(self, deadline: float, server: str) -> tuple[_Result | None, str | None]:
        """The call's result and None; or None and an error message.

        Args:
            deadline: in seconds of `time.monotonic()`.
            server: the server's name, for the message.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            return None, f"{server} did not answer in time"
        return self._result, self._error
