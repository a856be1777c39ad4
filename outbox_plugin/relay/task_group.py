"""A group of tasks, such as the stages of a term's pipeline: loops that run side by side and end together."""

from __future__ import annotations

from collections.abc import Callable

from outbox_plugin.core.backoff import Backoff
from outbox_plugin.core.intervals import POLL_FIRST, POLL_LAST
from outbox_plugin.relay.runtime import Condition, Runtime, Task


class TaskGroup:
    """Runs tasks that share what `lock` guards. The first to fail ends all, and its error is raised by `run`."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.lock = runtime.lock()
        self.runtime = runtime
        self.stopping = False
        self._name = name
        self._conditions: list[Condition] = []
        self._tasks: list[Task] = []
        self._rested = self.condition()
        self._error: BaseException | None = None

    def condition(self) -> Condition:
        """Return a condition on which a task waits; `stop` wakes it, too. With one for each, no task wakes in vain."""
        condition = self.runtime.condition(self.lock)
        self._conditions.append(condition)
        return condition

    def run(self, main: Callable[[], None], **others: Callable[[], None]) -> None:
        """Run `main` here and each of `others` on a thread of its name; returns when all have ended.

        Raises:
            BaseException: what the first task to fail raised.
        """
        for name, work in others.items():
            self.spawn(work, name)
        self._guard(main)
        for task in self._tasks:  # A task may add to them until it has ended.
            task.join()
        if self._error is not None:
            raise self._error

    def spawn(self, work: Callable[[], None], name: str) -> None:
        """Add a task: `work`, on a thread of its own. `run` waits for it, and raises its error."""
        self._tasks.append(self.runtime.spawn(lambda: self._guard(work), f"{self._name}-{name}"))

    def stop(self) -> None:
        """Ask every task to end."""
        with self.lock:
            self._stop()

    def rest(self, seconds: float) -> None:
        """Wait for `seconds`, or until the tasks are to end."""
        with self.lock:
            self._rested.wait_for(lambda: self.stopping, seconds)

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Call `condition` with a backoff until it is true. Returns False if the tasks are to end before."""
        backoff = Backoff(POLL_FIRST, POLL_LAST)
        while not condition():
            self.rest(backoff.wait())
            if self.stopping:
                return False
        return True

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self.lock:
                self._error = self._error or error
                self._stop()

    def _stop(self) -> None:
        self.stopping = True
        for condition in self._conditions:
            condition.notify_all()
