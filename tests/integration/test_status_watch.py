"""`outbox status --watch` on a terminal: however it ends, the terminal shows again what it showed before."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outbox_plugin.settings import Settings
from tests.harvesting import environment
from tests.processes import outbox_that_hears
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

OTHER_SCREEN, FORMER_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


ENDS = [(signal.SIGINT, 0), (signal.SIGTERM, 128 + 15), (signal.SIGHUP, 128 + 1)]
HIDDEN_CURSOR, SHOWN_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


@contextmanager
def watching(settings: Settings, number: signal.Signals) -> Iterator[tuple[subprocess.Popen[bytes], bytearray]]:
    """The command, and what its terminal has been sent so far."""
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
    ) as process:
        try:
            yield process, shown
        finally:
            process.kill()
    os.close(terminal)
    reader.join(10 * PATIENCE)
    os.close(controller)
    assert b"Traceback" not in shown


@pytest.mark.parametrize(("number", "exit_code"), ENDS)
def test_the_terminal_is_as_it_was(settings: Settings, number: signal.Signals, exit_code: int) -> None:
    with watching(settings, number) as (process, shown):
        eventually(lambda: OTHER_SCREEN in shown, 60)
        process.send_signal(number)
        assert process.wait(60 * PATIENCE) == exit_code
        # Before the terminal is closed.
        eventually(lambda: shown.rfind(FORMER_SCREEN) > shown.rindex(OTHER_SCREEN), 10)


@pytest.mark.parametrize(("number", "exit_code"), ENDS)
def test_the_cursor_is_shown_again_where_a_server_has_not_answered_yet(
    settings: Settings, number: signal.Signals, exit_code: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nowhere = settings.model_copy(update={"bootstrap_servers": f"127.0.0.1:{silent.getsockname()[1]}"})
        with watching(nowhere, number) as (process, shown):
            eventually(lambda: HIDDEN_CURSOR in shown, 60)
            process.send_signal(number)
            assert process.wait(60 * PATIENCE) == exit_code
            eventually(lambda: shown.rfind(SHOWN_CURSOR) > shown.rindex(HIDDEN_CURSOR), 10)
