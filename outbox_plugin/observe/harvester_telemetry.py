"""Serves the metrics and the readiness of a harvester: passes its events on to what counts them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from outbox_plugin.core.readiness import NotReady, Readiness
from outbox_plugin.observe.guard import guarded
from outbox_plugin.observe.harvester_facts import HarvesterFacts
from outbox_plugin.observe.harvester_metrics import GroupMetrics, HarvesterMetrics
from outbox_plugin.observe.table_poller import TablePoller, TableState
from outbox_plugin.observe.telemetry_server import join, leave
from outbox_plugin.relay.events import HarvestEvent
from outbox_plugin.settings import Settings, host_and_port


class HarvesterTelemetry:
    """Serves the metrics and the readiness of a harvester at OUTBOX_LISTEN, from its start to its stop."""

    def __init__(
        self,
        settings: Settings,
        listen: str,
        *,
        error: Callable[[], BaseException | None],
        stopping: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        """Open the port, or share it with others of this process.

        Args:
            settings: name the outbox.
            listen: the value of OUTBOX_LISTEN.
            error: returns the error that made the harvester end by itself; None if there is none.
            stopping: returns whether the harvester was asked to stop.
            now: the clock of its runtime.

        Raises:
            InvalidSetting: it is not possible to listen on the address.
        """
        self._settings = settings
        self._error = error
        self._stopping = stopping
        self._facts = HarvesterFacts(now)
        self._table: tuple[TableState, float] | None = None
        self._poller: TablePoller | None = None
        self._port = join(*host_and_port(listen))
        try:
            self._metrics = GroupMetrics(self._port.metrics_of(HarvesterMetrics), settings.group)
        except BaseException:
            leave(self._port, self)
            raise
        self._count = guarded(self._metrics.observe, self.name)
        self._port.add(self)

    @property
    def name(self) -> str:
        """The harvester's name in the port's answers."""
        return f"group {self._settings.group}"

    def observe(self, event: HarvestEvent) -> None:
        """Count an event of the relay."""
        self._facts.observe(event)
        self._count(event)

    def poll_table(self) -> None:
        """Start to read the table's state from Postgres every few seconds."""
        self._poller = TablePoller(self._settings, self._update, self._facts.table_unavailable)

    def _update(self, table: TableState) -> None:
        self._table = table, time.time()
        self._facts.table_looked_at(None if table.waiting is None else table.waiting.keys(), table.paused)

    def is_alive(self) -> bool:
        """Whether the harvester runs; if not, the process should be restarted."""
        return self._facts.is_alive(runs=self._error() is None)

    def readiness(self) -> Mapping[int, Readiness]:
        """For each shard, whether it is relayed as it should be, or why not."""
        if (error := self._error()) is not None:
            return {0: NotReady(f"the harvester has ended: {error}")}
        if self._stopping():
            return {0: NotReady("the harvester is stopping")}
        return self._facts.readiness()

    def verdicts(self) -> Mapping[str, Readiness]:
        """The readiness of each shard, by its name in the port's answers."""
        return {f"{self.name}, shard {shard}": verdict for shard, verdict in self.readiness().items()}

    def show_gauges(self) -> None:
        """Set the gauges to the current state."""
        leads = self._facts.leads()
        for shard, readiness in self.readiness().items():
            self._metrics.show_shard(shard, leads=shard in leads, readiness=readiness)
        if self._table is not None:
            self._metrics.show_table(*self._table)

    def close(self) -> None:
        """Leave the port, and close it if nobody else uses it."""
        leave(self._port, self)
        if self._poller is not None:
            self._poller.close()
        self._metrics.close()
