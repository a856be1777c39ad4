"""Runs a server for as long as its lifeline, standard input, stays open: `python -m outbox_plugin.embedded.guard …`.

The process that starts a server holds the other end of the lifeline and never writes to it. When that process ends,
even by kill -9, the pipe closes, and the guard stops the server as its administrator would. If the guard itself is
killed, the kernel ends the server.

Usage: guard SIGNAL OWNER COMMAND [ARGUMENT …]. SIGNAL stops the server. OWNER is `as-is`, or a folder: then the server
runs in that folder as `nobody`, without any of root's rights, because Postgres refuses to run as root.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

UNPRIVILEGED_USER = "nobody"
STOP_SECONDS = 15
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # The process that holds the lifeline handles them.
_PR_SET_PDEATHSIG = 1


def unprivileged(folder: str | Path) -> dict[str, Any]:
    """Arguments for subprocess that run a command as `nobody`, in `folder`. With root's user id, its capabilities end.

    The process changes into the folder before it gives up root's rights. So the command can use a folder whose path
    `nobody` may not traverse, such as one below /root, under the name `/proc/self/cwd`.
    """
    user = pwd.getpwnam(UNPRIVILEGED_USER)
    return {"cwd": folder, "user": user.pw_uid, "group": user.pw_gid, "extra_groups": ()}


def _before_exec() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)  # A child would inherit that they are ignored.
    if sys.platform == "linux":  # After the change of user, which clears this setting.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> int:
    """Run the command; returns its exit code."""
    stop_signal, owner, command = signal.Signals[sys.argv[1]], sys.argv[2], sys.argv[3:]
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_before_exec,
        **({} if owner == "as-is" else unprivileged(owner)),
    )
    ended = _wait_for_either(server)
    if not ended:
        server.send_signal(stop_signal)
    try:
        return server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def _wait_for_either(server: subprocess.Popen[bytes]) -> bool:
    """Wait until the server has ended (True) or the lifeline is closed (False)."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while server.poll() is None:
        readable, _, _ = select.select([sys.stdin.fileno(), wake_read], [], [], 1.0)
        if sys.stdin.fileno() in readable:
            return False
        if wake_read in readable:
            os.read(wake_read, 512)
    return True


if __name__ == "__main__":
    sys.exit(main())
