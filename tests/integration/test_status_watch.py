"""`outbox status --watch` on a terminal: however it ends, the terminal shows again what it showed before."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import threading

import pytest

from outbox_plugin.settings import Settings
from tests.harvesting import environment
from tests.processes import outbox_that_hears
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

OTHER_SCREEN, FORMER_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + 15), (signal.SIGHUP, 128 + 1)]
)
def test_the_terminal_is_as_it_was(settings: Settings, number: signal.Signals, exit_code: int) -> None:
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
    with subprocess.Popen(
        outbox_that_hears(number, "status", "--watch"),
        env={**environment(settings), "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
    ) as watching:
        try:
            eventually(lambda: OTHER_SCREEN in shown, 60)
            watching.send_signal(number)
            assert watching.wait(60 * PATIENCE) == exit_code
        finally:
            watching.kill()
    eventually(lambda: shown.rfind(FORMER_SCREEN) > shown.rindex(OTHER_SCREEN), 10)  # Before the terminal is closed.
    os.close(terminal)
    reader.join(10 * PATIENCE)
    os.close(controller)
    assert b"Traceback" not in shown
