"""A signal asks a program to end; the second one ends it, also while it looks at nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import pytest

from outbox_plugin.threads.signals import exit_on, on_the_terminal
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
IN_A_LIBRARY = """
import signal, socket, threading
from confluent_kafka.admin import AdminClient
from outbox_plugin.threads.signals import stop_on
silent = socket.create_server(("127.0.0.1", 0))
admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{silent.getsockname()[1]}"})
stop_on((signal.SIGTERM, signal.SIGINT), threading.Event())
print("ready", flush=True)
admin.list_topics(timeout=600)
"""
HANDS_OVER = """
import signal, threading, time
from outbox_plugin.threads.signals import stop_on
stop = threading.Event()
stop_on((signal.SIGTERM, signal.SIGINT), stop)
print("ready", flush=True)
stop.wait()
time.sleep(0.3)
print("handed over", flush=True)
"""

UNDER_NOHUP = """
import signal, threading, time
signal.signal(signal.SIGHUP, signal.{handler})
from outbox_plugin.threads.signals import ending_signals, stop_on
stop = threading.Event()
stop_on(ending_signals(), stop)
signal.raise_signal(signal.SIGHUP)
print(stop.wait({seconds}))
"""


def test_a_signal_that_comes_while_the_event_is_waited_for_is_heard() -> None:
    """Python runs the handler on the main thread, which may hold the event's lock."""
    ended = subprocess.run([sys.executable, "-c", ASKED_WITHIN_A_WAIT], timeout=60 * PATIENCE, check=False)
    assert ended.returncode == 0


def test_the_second_signal_ends_a_program_that_does_not_look_at_the_event() -> None:
    assert ended_by_signals(DEAF) == 128 + signal.SIGINT


def test_the_second_signal_ends_a_program_that_waits_in_a_library() -> None:
    """Python runs no handler before the library's call returns."""
    assert ended_by_signals(IN_A_LIBRARY) == 128 + signal.SIGINT


def ended_by_signals(text: str) -> int:
    """The exit code of a program that gets SIGINT again and again."""
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            deadline = time.monotonic() + 60 * PATIENCE
            while program.poll() is None and time.monotonic() < deadline:
                program.send_signal(signal.SIGINT)
                time.sleep(0.01)
        finally:
            program.kill()
    return program.returncode


def test_a_signal_that_is_passed_on_at_once_is_the_same_one() -> None:
    """A terminal sends it to a process group; a parent that is in the group passes it on."""
    with subprocess.Popen([sys.executable, "-c", HANDS_OVER], stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            program.send_signal(signal.SIGINT)
            time.sleep(0.05)
            program.send_signal(signal.SIGINT)
            assert program.stdout.read() == "handed over\n"
        finally:
            program.kill()
    assert program.returncode == 0


@pytest.mark.parametrize(
    ("handler", "seconds", "is_heard"), [("SIG_DFL", 60 * PATIENCE, "True"), ("SIG_IGN", 0.5, "False")]
)
def test_the_end_of_a_terminal_ends_a_program_unless_it_ran_under_nohup(
    handler: str, seconds: float, is_heard: str
) -> None:
    program = UNDER_NOHUP.format(handler=handler, seconds=seconds)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == is_heard


class Cursor:
    """A display that hides the cursor, and hears a signal in the midst of that."""

    def __init__(self, *, while_it: str) -> None:
        self.while_it = while_it
        self.done: list[str] = []

    def start(self) -> None:
        self._do("start")

    def stop(self) -> None:
        self._do("stop")

    def _do(self, what: str) -> None:
        if what == self.while_it:
            signal.raise_signal(signal.SIGTERM)
        self.done.append(what)


@pytest.mark.parametrize("while_it", ["start", "stop"])
def test_a_signal_waits_until_a_display_has_started_or_stopped(while_it: str) -> None:
    cursor = Cursor(while_it=while_it)
    with pytest.raises(SystemExit) as ended, exit_on([signal.SIGTERM]), on_the_terminal(cursor):
        cursor.done.append("body")
    assert ended.value.code == 128 + signal.SIGTERM
    assert cursor.done == {"start": ["start", "stop"], "stop": ["start", "body", "stop"]}[while_it]


@pytest.mark.parametrize(
    ("number", "ends_by"), [(signal.SIGINT, KeyboardInterrupt()), (signal.SIGTERM, SystemExit(128 + signal.SIGTERM))]
)
@pytest.mark.parametrize("own", [None, SystemError("a result with an exception set")])
def test_a_signal_counts_though_a_library_raises_an_error_of_its_own(
    number: signal.Signals, ends_by: BaseException, own: Exception | None
) -> None:
    with _handled(number, signal.default_int_handler):
        with pytest.raises(type(ends_by)) as ended, exit_on([number]):
            _raise_in_a_library(number, own)
        assert repr(ended.value) == repr(ends_by)
        assert signal.getsignal(number) is signal.default_int_handler


def _raise_in_a_library(number: signal.Signals, own: Exception | None) -> None:
    try:
        signal.raise_signal(number)
    except BaseException as error:
        raise own or error from error


def test_a_signal_that_is_ignored_ends_nothing() -> None:
    with _handled(signal.SIGINT, signal.SIG_IGN), exit_on([signal.SIGINT]):
        signal.raise_signal(signal.SIGINT)


@contextmanager
def _handled(
    number: signal.Signals, handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    former = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, former)


def test_a_signal_that_somebody_has_caught_ends_the_body_at_its_end() -> None:
    with _handled(signal.SIGINT, signal.default_int_handler):
        with pytest.raises(KeyboardInterrupt), exit_on([signal.SIGINT]), suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
