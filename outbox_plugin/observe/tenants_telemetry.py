"""Shows at OUTBOX_LISTEN how many tenants a process harvests, and which of them it cannot harvest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge

from outbox_plugin.core.readiness import NotReady, Readiness, Ready
from outbox_plugin.observe.harvester_metrics import HarvesterMetrics
from outbox_plugin.observe.telemetry_server import join, leave
from outbox_plugin.printable import first_names
from outbox_plugin.settings import host_and_port


class TenantMetrics:
    """The metrics of all patterns, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tenants = Gauge(
            "outbox_tenants",
            "Schemas whose outboxes match the pattern, by whether this process harvests them.",
            ["group", "state"],
            registry=registry,
        )

    def clear_gauges(self) -> None:
        """Clear the gauge before a scrape sets it."""
        self.tenants.clear()


class TenantsTelemetry:
    """Telemetry of its own. It keeps the port open while there are no tenants, too."""

    def __init__(
        self,
        table: str,
        group: str,
        listen: str,
        *,
        running: Callable[[], int],
        resting: Callable[[], int],
        waiting: Callable[[], int],
        failed: Callable[[], Sequence[str]],
        error: Callable[[], str | None],
        is_alive: Callable[[], bool],
    ) -> None:
        """Open the port, or share it with others of this process.

        Args:
            table: the pattern.
            group: what the tenants' groups begin with.
            listen: the value of OUTBOX_LISTEN.
            running: returns how many tenants are harvested.
            resting: returns how many are at rest.
            waiting: returns how many wait to be started.
            failed: returns the schemas that could not be harvested.
            error: returns why tenants that come or go are not noticed; None if they are.
            is_alive: returns whether the service runs.

        Raises:
            InvalidSetting: it is not possible to listen on the address.
        """
        self._table = table
        self._group = group
        self._running = running
        self._resting = resting
        self._waiting = waiting
        self._failed = failed
        self._error = error
        self._is_alive = is_alive
        self._port = join(*host_and_port(listen))
        try:
            self._metrics = self._port.metrics_of(TenantMetrics)
            self._harvesters = self._port.metrics_of(HarvesterMetrics)
        except BaseException:
            leave(self._port, self)
            raise
        self._port.add(self)

    @property
    def name(self) -> str:
        """Its name in the responses."""
        return f"tenants {self._table}"

    def is_alive(self) -> bool:
        """Whether the service runs; if not, the process should be restarted."""
        return self._is_alive()

    def verdicts(self) -> Mapping[str, Readiness]:
        """Ready while tenants that come and go are noticed. One that cannot be harvested is only named."""
        if (error := self._error()) is not None:
            return {self.name: NotReady(error)}
        failed = self._failed()
        but = f"; {len(failed)} cannot be: {first_names(failed)}" if failed else ""
        resting = f", {count} are at rest" if (count := self._resting()) else ""
        waiting = f", {count} wait for a place" if (count := self._waiting()) else ""
        return {self.name: Ready(f"{self._running()} schema(s) are harvested{resting}{waiting}{but}")}

    def show_gauges(self) -> None:
        """Set the gauges to the current state."""
        self._metrics.tenants.labels(self._group, "harvested").set(self._running())
        self._metrics.tenants.labels(self._group, "failed").set(len(self._failed()))
        self._metrics.tenants.labels(self._group, "resting").set(self._resting())
        self._metrics.tenants.labels(self._group, "waiting").set(self._waiting())

    def forget(self, group: str) -> None:
        """The tenant of the group is gone: remove its series from the metrics of harvesters."""
        self._harvesters.forget(group)

    def close(self) -> None:
        """Leave the port, and close it if nobody else uses it."""
        leave(self._port, self)
