"""The stages of a pipeline: loops that run side by side and end together."""

from __future__ import annotations

from collections.abc import Callable

from outbox_plugin.relay.runtime import Runtime


class Stages:
    """Runs stages that share what `changed` guards. The first to fail ends all, and its error is raised by `run`."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.changed = runtime.condition()
        self.runtime = runtime
        self.stopping = False
        self._name = name
        self._error: BaseException | None = None

    def run(self, main: Callable[[], None], **others: Callable[[], None]) -> None:
        """Run `main` here and each of `others` on a thread of its name; returns when all have ended.

        Raises:
            BaseException: what the first stage to fail raised.
        """
        tasks = [
            self.runtime.spawn(lambda work=work: self._guard(work), f"{self._name}-{name}")  # type: ignore[misc]
            for name, work in others.items()
        ]
        self._guard(main)
        for task in tasks:
            task.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Ask every stage to end."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()

    def rest(self, seconds: float) -> None:
        """Wait for so long, or until the stages are to end."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopping, seconds)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self.changed:
                self._error = self._error or error
                self.stopping = True
                self.changed.notify_all()
