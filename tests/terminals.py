"""Runs `outbox` on a terminal, and looks at what it shows there."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from outbox_plugin.settings import Settings
from tests.harvesting import environment
from tests.processes import outbox_that_hears
from tests.support import PATIENCE

HIDDEN_CURSOR, SHOWN_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


@contextmanager
def a_terminal() -> Iterator[tuple[int, bytearray]]:
    """A terminal that is read all the time: else it would hold up who writes to it.

    Returns:
        Its file descriptor, and what it has been sent so far; all of that, once the body has ended.
    """
    controller, terminal = pty.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while found := os.read(controller, 4096):
                shown.extend(found)
        except OSError:  # The terminal was closed.
            return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield terminal, shown
    finally:
        os.close(terminal)
        reader.join(10 * PATIENCE)
        os.close(controller)


@contextmanager
def on_terminal(
    settings: Settings, number: signal.Signals, *arguments: str
) -> Iterator[tuple[subprocess.Popen[bytes], bytearray]]:
    """Run a command on a terminal.

    Args:
        settings: those of the command.
        number: a signal that it shall hear.
        arguments: what follows `outbox`.

    Returns:
        The command, and what its terminal has been sent so far.
    """
    with (
        a_terminal() as (terminal, shown),
        subprocess.Popen(
            outbox_that_hears(number, *arguments),
            env={**environment(settings), "TERM": "xterm"},
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=terminal,
        ) as process,
    ):
        try:
            yield process, shown
        finally:
            process.kill()
    assert b"Traceback" not in shown
