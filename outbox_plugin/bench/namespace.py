"""A network namespace for one harvester, in which packets to a server can be made to vanish.

A proxy acknowledges what it receives, so a client behind it never sees TCP's behaviour when packets are lost. A
harvester in its own namespace does; a pair of virtual network devices connects it to ours. The servers may listen only
on 127.0.0.1: `route_localnet`, which is set only for these devices, lets packets to that address leave and enter.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_TABLE = "77"  # Of routes that lead nowhere.


class Namespace:
    """Exists between `__enter__` and `__exit__`."""

    def __init__(self, number: int) -> None:
        """`number` tells it from others of this process, and is from 0 to 30."""
        self._name = f"outbox-{os.getpid()}-{number}"
        self._outside, self._inside = f"ob{os.getpid() % 100_000}o{number}", f"ob{os.getpid() % 100_000}i{number}"
        self._network = f"10.213.{os.getpid() % 250}.{8 * number}"
        self._vanishing: list[list[str]] = []

    @staticmethod
    def unavailable() -> str | None:
        """Why there can be none here; None if there can."""
        if os.geteuid() != 0 or shutil.which("ip") is None:
            return "needs root, and `ip` of iproute2"
        name = f"outbox-{os.getpid()}"
        try:
            _run("ip", "netns", "add", name)
            _run("ip", "netns", "del", name)
        except subprocess.CalledProcessError as error:
            return f"needs the right to make network namespaces: {error.stderr.decode().strip()}"
        return None

    @property
    def prefix(self) -> list[str]:
        """What to put before a command that is to run in it."""
        return ["ip", "netns", "exec", self._name]

    def __enter__(self) -> Self:
        start, last = self._network.rsplit(".", 1)
        ours, theirs, nowhere = (f"{start}.{int(last) + number}" for number in (1, 2, 3))
        _run("ip", "netns", "add", self._name)
        try:
            _run("ip", "link", "add", self._outside, "type", "veth", "peer", "name", self._inside, "netns", self._name)
            _run("ip", "address", "add", f"{ours}/29", "dev", self._outside)
            _run("ip", "link", "set", self._outside, "up")
            Path(f"/proc/sys/net/ipv4/conf/{self._outside}/route_localnet").write_text("1")
            for command in (
                f"ip link set {self._inside} up",
                f"ip address add {theirs}/29 dev {self._inside}",
                f"sysctl -q -w net.ipv4.conf.{self._inside}.route_localnet=1",
                "ip link set lo up",
                "ip address del 127.0.0.1/8 dev lo",
                f"ip route add 127.0.0.1/32 via {ours} dev {self._inside} src {theirs}",
                "ip link add gone type veth peer name void",
                "ip link set void up",
                "ip link set gone up",
                f"ip neighbour add {nowhere} lladdr 02:00:00:00:00:01 dev gone nud permanent",
                f"ip route add 127.0.0.1/32 via {nowhere} dev gone onlink src {theirs} table {_TABLE}",
            ):
                _run(*self.prefix, *command.split())
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def vanish(self, ports: Iterable[int]) -> None:
        """Drop all packets to these TCP ports, until `restore`."""
        for port in ports:
            rule = ["pref", "0", "ipproto", "tcp", "dport", str(port), "lookup", _TABLE]
            self._vanishing.append(rule)
            _run(*self.prefix, "ip", "rule", "add", *rule)

    def restore(self) -> None:
        """Let packets arrive again."""
        while self._vanishing:
            _run(*self.prefix, "ip", "rule", "del", *self._vanishing.pop())

    def _remove(self) -> None:
        with suppress(subprocess.CalledProcessError):
            _run("ip", "netns", "del", self._name)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)
