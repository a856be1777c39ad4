"""A signal asks a program to end; the second one ends it, also while it looks at nothing."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.support import PATIENCE

ASKED_WITHIN_A_WAIT = """
import signal, threading
from outbox_plugin.threads.signals import stop_on
stop = threading.Event()
stop_on((signal.SIGTERM,), stop)
with stop._cond:  # As in the middle of `stop.wait`.
    signal.raise_signal(signal.SIGTERM)
stop.wait()
"""
DEAF = """
import signal, threading, time
from outbox_plugin.threads.signals import stop_on
stop_on((signal.SIGTERM, signal.SIGINT), threading.Event())
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


def test_a_signal_that_comes_while_the_event_is_waited_for_is_heard() -> None:
    """Python runs the handler on the main thread, which may hold the event's lock."""
    ended = subprocess.run([sys.executable, "-c", ASKED_WITHIN_A_WAIT], timeout=60 * PATIENCE, check=False)
    assert ended.returncode == 0


def test_the_second_signal_ends_a_program_that_does_not_look_at_the_event() -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            while program.poll() is None:
                program.send_signal(signal.SIGINT)
        finally:
            program.kill()
    assert program.returncode == -signal.SIGINT
