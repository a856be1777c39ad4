"""Questions to servers that may never answer, with a deadline that holds whatever a client library does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from outbox_plugin.errors import OutboxError

_Answer = TypeVar("_Answer")


class DeadlineFuture(Generic[_Answer]):
    """A question that is put on a thread of its own, because a client library's time-outs cannot be relied upon."""

    def __init__(self, question: Callable[[], _Answer]) -> None:
        self._question = question
        self._result: _Answer | None = None
        self._error: str | None = None
        self._thread = threading.Thread(target=self._ask, name="outbox-status", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self._result = self._question()
        except OutboxError as error:
            self._error = str(error)
        except Exception as error:  # Nobody joins this thread for its traceback: without this, all would seem well.
            self._error = f"unexpected: {error!r}"

    def result(self, deadline: float, server: str) -> tuple[_Answer | None, str | None]:
        """The answer, or what is wrong. `deadline`: of `time.monotonic()`, in seconds."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            return None, f"{server} did not answer in time"
        return self._result, self._error
