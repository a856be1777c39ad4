"""Runs a server for as long as its lifeline, standard input, stays open: `python -m outbox_plugin.embedded.guard …`.

The process that starts a server holds the other end of the lifeline and never writes to it. When that process ends,
even by kill -9, the pipe closes, and the guard stops the server as its administrator would. If the guard itself is
killed, the kernel ends the server.

Usage: guard SIGNAL COMMAND [ARGUMENT …]: SIGNAL stops the server; run as root, the server runs as `nobody`, because
Postgres refuses to be root. It keeps root's right to pass through folders, so that it works below /root too.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import select
import signal
import subprocess
import sys

UNPRIVILEGED_USER = "nobody"
STOP_SECONDS = 15
_NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # They are for whoever holds the lifeline.
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 1, 8, 47, 2
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2
_CAPABILITY_VERSION_3 = 0x20080522


def drop_root() -> None:
    """Become `nobody`, keeping the two capabilities that let a process pass through and write to any folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    user = pwd.getpwnam(UNPRIVILEGED_USER)
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    kept = (1 << _DAC_OVERRIDE) | (1 << _DAC_READ_SEARCH)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(kept, kept, kept, 0, 0, 0)  # effective, permitted, inheritable; then the high words
    if libc.capset(header, data) == 0:  # A container may withhold them; then the folders' permissions decide.
        for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
            libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability, 0, 0)


def _before_exec(unprivileged: bool) -> None:
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_DFL)  # What is ignored is inherited.
    if unprivileged:
        drop_root()
    if sys.platform == "linux":  # After the change of user, which would clear it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> int:
    """Run the command; returns its exit code."""
    stop_signal, unprivileged, command = signal.Signals[sys.argv[1]], sys.argv[2] == "unprivileged", sys.argv[3:]
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _before_exec(unprivileged),
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
    """Waits until the server has ended (True) or the lifeline is cut (False)."""
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
