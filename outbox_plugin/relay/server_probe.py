"""Asks servers for a sign of life, on a thread of its own: see `core.leadership_transfer`."""

from __future__ import annotations

from collections.abc import Callable

from outbox_plugin.relay.runtime import Runtime, Task


class ServerProbe:
    """The last answer to the question whether all brokers, or Postgres, answer this harvester. For one thread."""

    def __init__(self, all_answer: Callable[[], bool], runtime: Runtime) -> None:
        """Nothing has been asked.

        Args:
            all_answer: asks them, and waits for some seconds at most.
            runtime: makes the threads.
        """
        self._ask = all_answer
        self._runtime = runtime
        self._task: Task | None = None
        self._last: tuple[float, bool] | None = None  # When the last question began, and its answer.

    def result(self, since: float) -> bool | None:
        """Whether all have answered a question that began at `since` or later.

        Returns None while there is no such answer. Then the question is asked, and a later call has the answer.
        """
        if self._last is not None and self._last[0] >= since:
            return self._last[1]
        if self._task is None or not self._task.is_alive():
            self._task = self._runtime.spawn(self._probe, "outbox-probe")
        return None

    def _probe(self) -> None:
        """Ask, and ask again if not all have answered: on a busy machine, any server is slow now and then."""
        began, all_answer = self._runtime.now(), False
        try:
            all_answer = self._ask() or self._ask()
        finally:
            self._last = began, all_answer
