"""`outbox status --watch` on a terminal: however it ends, the terminal shows again what it showed before."""

from __future__ import annotations

import signal
import socket

import pytest

from outbox_plugin.settings import Settings
from tests.support import PATIENCE, eventually
from tests.terminals import HIDDEN_CURSOR, SHOWN_CURSOR, on_terminal

pytestmark = pytest.mark.integration

OTHER_SCREEN, FORMER_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
WATCH = ("status", "--watch")
ENDS = [(signal.SIGINT, 0), (signal.SIGTERM, 128 + 15), (signal.SIGHUP, 128 + 1)]


@pytest.mark.parametrize(("number", "exit_code"), ENDS)
def test_the_terminal_is_as_it_was(settings: Settings, number: signal.Signals, exit_code: int) -> None:
    with on_terminal(settings, number, *WATCH) as (process, shown):
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
        with on_terminal(nowhere, number, *WATCH) as (process, shown):
            eventually(lambda: HIDDEN_CURSOR in shown, 60)
            process.send_signal(number)
            assert process.wait(60 * PATIENCE) == exit_code
            eventually(lambda: shown.rfind(SHOWN_CURSOR) > shown.rindex(HIDDEN_CURSOR), 10)
