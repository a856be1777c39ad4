"""Time and threads, as the relay uses them: real ones in a harvester, simulated ones in a simulation.

A loop of the relay takes no clock, thread or lock from anywhere else, so a simulation decides every interleaving.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from outbox_plugin.log_tenant import of_same_tenant

Lock = AbstractContextManager[Any]  # To be held while state is touched; not to be taken twice.


class Condition(Protocol):
    """A place to wait until state has changed; the lock that guards it is held by whoever calls."""

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Give up the lock until `predicate` holds, or `timeout` seconds have passed; the predicate's last value."""
        ...

    def notify_all(self) -> None:
        """Let everyone who waits look again."""
        ...


class Task(Protocol):
    """A thread of execution that has been started."""

    def is_alive(self) -> bool:
        """Whether it still runs."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most `timeout` seconds."""
        ...


class Runtime(Protocol):
    """What a loop of the relay runs on."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def lock(self) -> Lock:
        """A new lock."""
        ...

    def condition(self, lock: Any) -> Condition:
        """A new condition of a `lock` that this runtime made."""
        ...

    def spawn(self, work: Callable[[], None], name: str) -> Task:
        """Start `work` beside the caller."""
        ...

    def new_id(self) -> str:
        """A UUID that was never used before."""
        ...


class Threads:
    """The real `Runtime`."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def lock(self) -> threading.Lock:
        """A new lock."""
        return threading.Lock()

    def condition(self, lock: threading.Lock) -> Condition:
        """A new condition of a `lock` that this runtime made."""
        return threading.Condition(lock)

    def spawn(self, work: Callable[[], None], name: str) -> Task:
        """Start `work` on a daemon thread."""
        thread = threading.Thread(target=of_same_tenant(work), name=name, daemon=True)
        thread.start()
        return thread

    def new_id(self) -> str:
        """A random UUID."""
        return str(uuid.uuid4())
