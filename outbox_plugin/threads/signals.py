"""Signals that ask a program to end."""

from __future__ import annotations

import signal
import threading
from types import FrameType


def stop_on(numbers: tuple[signal.Signals, ...], stop: threading.Event) -> None:
    """Set `stop` when one of these signals comes. The same signal once more ends the program at once.

    A program that waits for a server does not look at `stop` meanwhile. So whoever asks twice need not wait for it.

    Args:
        numbers: the signals. The caller is the main thread.
        stop: is set on another thread: the main thread may hold the event's lock when the signal comes.
    """

    def ask(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=stop.set, name="outbox-signal", daemon=True).start()

    for number in numbers:
        signal.signal(number, ask)
