"""Signals that ask a program to end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

# A second signal counts from then on. Before, it is taken for the same one: a terminal, or a service manager, sends it
# to all processes, and a parent among them passes it on.
SECOND_AFTER_SECONDS = 1.0

_Handler = Callable[[int, FrameType | None], object]


class Display(Protocol):
    """What changes the terminal until it stops; `stop` before `start` does nothing."""

    def start(self) -> None:
        """Begin to show it."""

    def stop(self) -> None:
        """Give the terminal back."""


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a program to end. SIGHUP is not among them where it is ignored, as under nohup."""
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hang_up)


@contextmanager
def exit_on(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """End the body by an exception when one of these signals comes, so that what it has opened is closed.

    SIGINT ends it by KeyboardInterrupt, any other by SystemExit. A library may raise an error of its own in place of
    that. It counts as the same. A signal that is ignored stays so.

    Args:
        numbers: the signals. The caller is the main thread.
    """
    heard: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        heard.append(number)
        raise _exception_of(number)

    with _handled_by(end, [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]):
        try:
            yield
        except BaseException:
            if heard:
                raise _exception_of(heard[0]) from None
            raise
        if heard:  # Somebody has caught it.
            raise _exception_of(heard[0])


def _exception_of(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


@contextmanager
def _handled_by(handler: _Handler, numbers: Collection[signal.Signals]) -> Iterator[None]:
    """Have a handler take these signals until the body ends."""
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former_handler in former.items():
            signal.signal(number, former_handler)


@contextmanager
def on_the_terminal(display: Display) -> Iterator[None]:
    """Show `display` until the body ends, also by a signal: the terminal is then as it was before.

    A signal that comes while the display starts or stops takes effect right after that. A display that has started by
    half cannot be stopped.
    """
    try:
        with _held_back(ending_signals()):
            display.start()
        yield
    finally:
        with _held_back(ending_signals()):
            display.stop()


@contextmanager
def _held_back(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """Have these signals take effect after the body."""
    heard: list[int] = []
    try:
        with _handled_by(lambda number, _: heard.append(number), numbers):
            yield
    finally:
        if heard:
            signal.raise_signal(heard[0])


def stop_on(numbers: Collection[signal.Signals], stop: threading.Event) -> None:
    """Set `stop` when one of these signals comes. The same signal once more ends the program at once.

    A program that waits for a server does not look at `stop` meanwhile. So whoever asks twice need not wait for it.

    Python runs a signal's handler on the main thread, once a call of a library in C has returned, and perhaps while
    that thread holds the event's lock. So signals are heard on another thread. It ends the program as a shell reports
    one that a signal has ended: with 128 and the signal's number.

    Args:
        numbers: the signals. The caller is the main thread, and nobody else calls `signal.set_wakeup_fd`.
        stop: is set on another thread.
    """
    heard, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(heard, numbers, stop), name="outbox-signals", daemon=True).start()
    for number in numbers:
        signal.signal(number, lambda *_: None)


def _listen(heard: int, numbers: Collection[signal.Signals], stop: threading.Event) -> None:
    first: dict[int, float] = {}
    while True:
        for number in os.read(heard, 64):
            if number not in numbers:
                continue
            now = time.monotonic()
            if now - first.setdefault(number, now) >= SECOND_AFTER_SECONDS:
                os._exit(128 + number)
            stop.set()
