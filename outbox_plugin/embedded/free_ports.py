"""Chooses TCP ports for servers on this machine, and gives each port only once."""

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

_LOWEST_PORT = 15_000  # Other servers usually have lower ports.
_RESERVED: set[int] = set()  # Ports that this process has reserved.
_RESERVING = threading.Lock()
os.register_at_fork(after_in_child=_RESERVED.clear)  # The locks belong to the parent.


def free_port(preferred: int | None = None) -> int:
    """A TCP port of 127.0.0.1 on which nobody listens: `preferred`, if it is free.

    It stays reserved until this process ends: no other call, and no other process of this user, gets it, although its
    server may start to listen only seconds later, and may be down for a while.

    It is lower than the ports that the kernel gives to outgoing connections. Otherwise such a connection could take a
    server's port while the server is down, even a client's attempt to reach that server.

    Raises:
        ServerFailed: no port is free.
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
    """Reserve the port for this process. Returns False if it is reserved already, by this process or another one."""
    with _RESERVING:
        if port in _RESERVED:
            return False
        try:
            fcntl.lockf(_reservations(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except (BlockingIOError, PermissionError):  # Another process has it; POSIX allows both errors.
            return False
        except OSError:  # The file system has no locks: other processes do not see the reservation.
            pass
        _RESERVED.add(port)
        return True


@cache
def _reservations() -> int:
    """A file with one byte per port. The process that has a port keeps a lock on its byte until the process ends."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / "ports", os.O_RDWR | os.O_CREAT, 0o600)
    except (OSError, RuntimeError):  # There is no writable home: other processes do not see the reservations.
        return os.dup(tempfile.TemporaryFile().fileno())


def _lowest_outgoing_port() -> int:
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        lowest = 32_768  # The default of Linux; BSDs start higher.
    return lowest if lowest > _LOWEST_PORT + 1_000 else 65_536
