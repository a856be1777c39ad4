"""Starts `outbox` so that it hears a signal."""

from __future__ import annotations

import signal
import sys


def outbox_that_hears(number: signal.Signals, *arguments: str) -> list[str]:
    """The command that runs `outbox`, also where the tests ignore the signal, as under nohup or in the background."""
    handler = "default_int_handler" if number == signal.SIGINT else "SIG_DFL"
    program = (
        f"import signal; signal.signal({int(number)}, signal.{handler}); from outbox_plugin.cli import main; main()"
    )
    return [sys.executable, "-c", program, *arguments]
