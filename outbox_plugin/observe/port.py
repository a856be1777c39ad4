"""One address of a process, shared by all of its members that have the same OUTBOX_LISTEN."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Protocol, TypeVar, cast

from prometheus_client import CollectorRegistry, generate_latest

from outbox_plugin.core.readiness import NotReady, Readiness
from outbox_plugin.observe.server import Answer, HttpServer
from outbox_plugin.printable import printable

# The text format that every version of Prometheus reads.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Protocol):
    """The metrics of all members of one kind. Creating it registers them."""

    def __init__(self, registry: CollectorRegistry) -> None: ...

    def clear_gauges(self) -> None:
        """Clear the gauges that each scrape sets again."""
        ...


MetricsKind = TypeVar("MetricsKind", bound=Metrics)


class Member(Protocol):
    """A harvester, an inbox or a consumer that is served. Any thread may call it, and no call may wait for a server."""

    @property
    def name(self) -> str:
        """The member's name in a line of an answer."""
        ...

    def is_alive(self) -> bool:
        """Whether the member runs; if not, the process should be restarted."""
        ...

    def verdicts(self) -> Mapping[str, Readiness]:
        """The readiness of each part of the member, by the part's name in an answer."""
        ...

    def show_gauges(self) -> None:
        """Set the gauges to the current state."""
        ...


class Port:
    """The server of an address, and its members. Use `join` to get one."""

    def __init__(self, host: str, port: int) -> None:
        """Bind the address.

        Raises:
            InvalidSetting: it is not possible to listen on the address.
        """
        self._registry = CollectorRegistry()
        self._scraping = threading.Lock()
        self._members: tuple[Member, ...] = ()
        self.uses = 0  # How many have joined and not left.
        self._kinds: dict[type[Any], Metrics] = {}
        pages = {"/metrics": self._metrics, "/readyz": self._ready, "/livez": self._live}
        self._server = HttpServer(host, port, pages)

    def metrics_of(self, kind: type[MetricsKind]) -> MetricsKind:
        """The metrics of one kind of members; the first call registers them."""
        with self._scraping:
            if kind not in self._kinds:
                self._kinds[kind] = kind(self._registry)
            return cast(MetricsKind, self._kinds[kind])

    def add(self, member: Member) -> None:
        """Include the member in the answers."""
        self._members = (*self._members, member)

    def remove(self, member: Member) -> None:
        """Leave the member out of the answers from now on."""
        self._members = tuple(each for each in self._members if each is not member)

    def close(self) -> None:
        """Free the address."""
        self._server.close()

    def _metrics(self) -> Answer:
        with self._scraping:
            for metrics in self._kinds.values():
                metrics.clear_gauges()
            for member in self._members:
                member.show_gauges()
            return Answer(generate_latest(self._registry).decode(), content_type=METRICS_TYPE)

    def _ready(self) -> Answer:
        lines, all_are_ready = [], bool(self._members)
        for member in self._members:
            for part, verdict in member.verdicts().items():
                is_ready = not isinstance(verdict, NotReady)
                all_are_ready = all_are_ready and is_ready
                reason = printable(" ".join(verdict.reason.split()))
                lines.append(f"{part}: {'ready' if is_ready else 'not ready'}: {reason}")
        return _answer(lines, is_well=all_are_ready)

    def _live(self) -> Answer:
        alive = [(member.name, member.is_alive()) for member in self._members]
        lines = [f"{name}: {'alive' if is_alive else 'not alive'}" for name, is_alive in alive]
        return _answer(lines, is_well=all(is_alive for _, is_alive in alive))


def _answer(lines: list[str], *, is_well: bool) -> Answer:
    return Answer("".join(f"{line}\n" for line in lines), HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE)


_ports: dict[tuple[str, int], Port] = {}
_joining = threading.Lock()


def join(host: str, port: int) -> Port:
    """The port of this process at that address; the first call opens it. `leave` it afterwards.

    Raises:
        InvalidSetting: it is not possible to listen on the address.
    """
    with _joining:
        if (host, port) not in _ports:
            _ports[host, port] = Port(host, port)
        found = _ports[host, port]
        found.uses += 1
        return found


def leave(port: Port, member: Member) -> None:
    """Remove `member` from the port, and close the port if it was the last one."""
    with _joining:
        port.remove(member)
        port.uses -= 1
        if not port.uses:
            for address in [address for address, each in _ports.items() if each is port]:
                del _ports[address]
            port.close()


def _forget_ports() -> None:
    """After a fork, forget the parent's ports: the child has none of the threads that serve them, and opens its own."""
    global _joining
    _joining = threading.Lock()
    _ports.clear()


os.register_at_fork(after_in_child=_forget_ports)
