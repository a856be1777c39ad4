"""TCP ports for servers of this machine, each given once."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
import threading
from functools import cache
from pathlib import Path

from outbox_plugin.embedded.server import ServerFailed, cache_folder

_LOWEST_PORT = 15_000  # Servers of other kinds are found below.
_RESERVED: set[int] = set()  # By this process.
_RESERVING = threading.Lock()
os.register_at_fork(after_in_child=_RESERVED.clear)  # The locks are its parent's.


def free_port(preferred: int | None = None) -> int:
    """A TCP port of 127.0.0.1 that nobody listens on: `preferred` if it is one.

    It stays reserved until this process ends: no other call, and no other process of this user, is given it as well.
    The server that it is for may begin to listen seconds later, and may be down for a while.

    It is below the ports that the kernel gives to outgoing connections: otherwise one of them, even a client's attempt
    to reach the very server, could take the port of a server while it is down.

    Raises:
        ServerFailed: there is none.
    """
    if preferred and _nobody_listens(preferred) and (preferred in _RESERVED or _reserve(preferred)):
        return preferred
    for port in random.sample(range(_LOWEST_PORT, _lowest_outgoing_port()), 1_000):
        if _nobody_listens(port) and _reserve(port):
            return port
    raise ServerFailed("no free TCP port on 127.0.0.1")


def _nobody_listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _reserve(port: int) -> bool:
    """Reserve the port for this process; False if it is reserved already, by whomever."""
    with _RESERVING:
        if port in _RESERVED:
            return False
        try:
            fcntl.lockf(_reservations(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except (BlockingIOError, PermissionError):  # Another process has it; POSIX allows both errors.
            return False
        except OSError:  # A file system without locks: no other process sees it.
            pass
        _RESERVED.add(port)
        return True


@cache
def _reservations() -> int:
    """A file with a byte for each port, which is locked by the process that has the port, for as long as it lives."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / "ports", os.O_RDWR | os.O_CREAT, 0o600)
    except (OSError, RuntimeError):  # There is no home, or nothing can be kept there: no other process sees them.
        return os.dup(tempfile.TemporaryFile().fileno())


def _lowest_outgoing_port() -> int:
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        lowest = 32_768  # Linux' own default; the BSDs begin higher.
    return lowest if lowest > _LOWEST_PORT + 1_000 else 65_536
