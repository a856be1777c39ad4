"""Serves the telemetry of a process: of all harvesters, inboxes and consumers with the same OUTBOX_LISTEN."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Protocol, TypeVar, cast

from prometheus_client import CollectorRegistry, generate_latest

from outbox_plugin.core.readiness import NotReady, Readiness
from outbox_plugin.observe.http_server import HttpServer, Response
from outbox_plugin.printable import printable

# The text format that every version of Prometheus reads.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Protocol):
    """The metrics of all harvesters, of all inboxes, or of all consumers. Creating it registers them."""

    def __init__(self, registry: CollectorRegistry) -> None: ...

    def clear_gauges(self) -> None:
        """Clear the gauges that each scrape sets again."""
        ...


MetricsKind = TypeVar("MetricsKind", bound=Metrics)


class Telemetry(Protocol):
    """What a harvester, an inbox or a consumer shows. Any thread may call it, and no call may wait for a server."""

    @property
    def name(self) -> str:
        """Its name in a line of a response."""
        ...

    def is_alive(self) -> bool:
        """Whether what it belongs to runs; if not, the process should be restarted."""
        ...

    def verdicts(self) -> Mapping[str, Readiness]:
        """The readiness of each part, by the part's name in a response."""
        ...

    def show_gauges(self) -> None:
        """Set the gauges to the current state."""
        ...


class TelemetryServer:
    """The server of an address, and the telemetry that it shows. Use `join` to get one."""

    def __init__(self, host: str, port: int) -> None:
        """Bind the address.

        Raises:
            InvalidSetting: it is not possible to listen on the address.
        """
        self._registry = CollectorRegistry()
        self._scraping = threading.Lock()
        self._shown: tuple[Telemetry, ...] = ()
        self.uses = 0  # How many have joined and not left.
        self._kinds: dict[type[Any], Metrics] = {}
        pages = {"/metrics": self._metrics, "/readyz": self._ready, "/livez": self._live}
        self._server = HttpServer(host, port, pages)

    def metrics_of(self, kind: type[MetricsKind]) -> MetricsKind:
        """The metrics of this kind; the first call registers them."""
        with self._scraping:
            if kind not in self._kinds:
                self._kinds[kind] = kind(self._registry)
            return cast(MetricsKind, self._kinds[kind])

    def add(self, telemetry: Telemetry) -> None:
        """Show it in the responses."""
        self._shown = (*self._shown, telemetry)

    def remove(self, telemetry: Telemetry) -> None:
        """Leave it out of the responses from now on."""
        self._shown = tuple(each for each in self._shown if each is not telemetry)

    def close(self) -> None:
        """Free the address."""
        self._server.close()

    def _metrics(self) -> Response:
        with self._scraping:
            for metrics in self._kinds.values():
                metrics.clear_gauges()
            for telemetry in self._shown:
                telemetry.show_gauges()
            return Response(generate_latest(self._registry).decode(), content_type=METRICS_TYPE)

    def _ready(self) -> Response:
        lines, all_are_ready = [], bool(self._shown)
        for telemetry in self._shown:
            for part, verdict in telemetry.verdicts().items():
                is_ready = not isinstance(verdict, NotReady)
                all_are_ready = all_are_ready and is_ready
                reason = printable(" ".join(verdict.reason.split()))
                lines.append(f"{part}: {'ready' if is_ready else 'not ready'}: {reason}")
        return _response(lines, is_well=all_are_ready)

    def _live(self) -> Response:
        alive = [(telemetry.name, telemetry.is_alive()) for telemetry in self._shown]
        lines = [f"{name}: {'alive' if is_alive else 'not alive'}" for name, is_alive in alive]
        return _response(lines, is_well=all(is_alive for _, is_alive in alive))


def _response(lines: list[str], *, is_well: bool) -> Response:
    return Response(
        "".join(f"{line}\n" for line in lines), HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
    )


_servers: dict[tuple[str, int], TelemetryServer] = {}
_joining = threading.Lock()


def join(host: str, port: int) -> TelemetryServer:
    """The server of this process at that address; the first call starts it. `leave` it afterwards.

    Raises:
        InvalidSetting: it is not possible to listen on the address.
    """
    with _joining:
        if (host, port) not in _servers:
            _servers[host, port] = TelemetryServer(host, port)
        found = _servers[host, port]
        found.uses += 1
        return found


def leave(server: TelemetryServer, telemetry: Telemetry) -> None:
    """Remove `telemetry` from the server, and close the server if nobody else uses it."""
    with _joining:
        server.remove(telemetry)
        server.uses -= 1
        if not server.uses:
            for address in [address for address, each in _servers.items() if each is server]:
                del _servers[address]
            server.close()


def _forget_servers() -> None:
    """After a fork, forget the parent's servers: the child has none of their threads, and starts its own."""
    global _joining
    _joining = threading.Lock()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_servers)
