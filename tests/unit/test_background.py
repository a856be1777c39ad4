"""Services that run until a signal comes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from outbox_plugin.errors import ServerRefused
from outbox_plugin.threads.background import Background, run_together
from tests.support import PATIENCE

# The signal comes while the main thread waits for the event, and holds its lock.
SIGNALLED_WITHIN_A_WAIT = """
import signal, threading
from outbox_plugin.threads.background import Background, run_together

class Service(Background):
    def _prepare(self, loop):
        return self._stop.wait

class Event(threading.Event):
    def wait(self, timeout=None):
        if threading.current_thread() is threading.main_thread():
            with self._cond:
                signal.raise_signal(signal.SIGTERM)
        return super().wait(timeout)

stop = Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
threading.Timer(0.3, signal.raise_signal, [signal.SIGTERM]).start()
run_together([Service("service")], stop)
print("ended")
"""


class WaitsForALock(Background):
    """Its start waits for somebody else until it is to stop, and gives up then."""

    def __init__(self) -> None:
        super().__init__("service")
        self.waits = threading.Event()

    def _prepare(self, loop: asyncio.AbstractEventLoop | None) -> Callable[[], None]:
        self.waits.set()
        if not self._stop.wait(60 * PATIENCE):
            raise AssertionError("it was not told")
        raise ServerRefused("the table is locked")


def test_a_start_that_waits_is_told_to_stop() -> None:
    service, stop = WaitsForALock(), threading.Event()
    running = threading.Thread(target=run_together, args=([service], stop))
    running.start()
    service.waits.wait()
    stop.set()
    running.join(30 * PATIENCE)
    assert not running.is_alive()


def test_a_start_that_fails_while_nobody_stops_it_is_reported() -> None:
    with pytest.raises(ServerRefused):
        run_together([_Refused()], threading.Event())


class _Refused(Background):
    def __init__(self) -> None:
        super().__init__("service")

    def _prepare(self, loop: asyncio.AbstractEventLoop | None) -> Callable[[], None]:
        raise ServerRefused("no")


def test_a_signals_handler_may_set_the_event() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SIGNALLED_WITHIN_A_WAIT],
        timeout=30 * PATIENCE,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "ended\n"
