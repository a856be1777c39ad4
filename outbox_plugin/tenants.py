"""Harvests the outboxes of all schemas that a pattern matches, also of those that come later.

Each tenant has a harvester of its own, with a group of its own, so that one that is dropped, broken or locked harms
itself alone. `core.tenant_schedule` decides what is started and stopped.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from outbox_plugin.core.tenant_schedule import TenantSchedule
from outbox_plugin.errors import InvalidSetting, ServerRefused, StoreUnavailable
from outbox_plugin.harvester import Harvester
from outbox_plugin.observe.metrics_extra import metrics_extra
from outbox_plugin.printable import logger_of
from outbox_plugin.schema.connection import connect, reported, reported_as_refusal
from outbox_plugin.schema.outboxes import tenant_schemas
from outbox_plugin.settings import Settings
from outbox_plugin.threads.background import Background

if TYPE_CHECKING:  # Importing it needs an extra.
    from outbox_plugin.observe.tenants import ObservedTenants

logger = logger_of("outbox_plugin.harvester")

SEARCH_SECONDS = 5.0  # Between two searches for schemas.
CHECK_SECONDS = 0.5  # Between two looks at the harvesters.
STARTS_AT_ONCE = 8  # Each is a connection to Postgres, and requests to Kafka.
SLOW_SECONDS = 10.0  # A start that takes longer waits for a lock, or for a server: others go on beside it.
STOP_SECONDS = 30.0  # For all harvesters together. One that is stuck in its start ends with the process.


class _Start:
    """A harvester's start on a thread of its own, which does not keep the process from ending."""

    def __init__(self, harvester: Harvester, now: float) -> None:
        self._harvester = harvester
        self._began = now
        self._thread = threading.Thread(target=self._run, name="outbox-tenant-start", daemon=True)
        self.error: BaseException | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            self._harvester.start()
        except BaseException as error:
            self.error = error

    @property
    def has_ended(self) -> bool:
        """Whether it has succeeded or failed."""
        return not self._thread.is_alive()

    def is_slow(self, now: float) -> bool:
        """Whether it waits for something."""
        return now - self._began >= SLOW_SECONDS


class TenantHarvesters(Background):
    """Harvesters for all schemas whose outboxes `OUTBOX_TABLE`, such as `tenant_*.outbox`, matches.

    A schema that is created is harvested some seconds later, and one that is dropped no longer.

    Example:
        with TenantHarvesters(Settings(table="tenant_*.outbox")):
            ...  # They relay in the background, and hand over at the end.
    """

    def __init__(self, settings: Settings, *, adopt: bool = False) -> None:
        """Make the service. It opens no connection yet.

        Args:
            settings: their `table` names the schemas by a pattern.
            adopt: as for `Harvester`, for each tenant.

        Raises:
            InvalidSetting: `table` names one outbox.
        """
        super().__init__("tenants' harvesters")
        if not settings.names_many:
            raise InvalidSetting(f"OUTBOX_TABLE: expected a schema with * (given: {settings.table!r})")
        self._settings = settings
        self._adopt = adopt
        self._schedule = TenantSchedule()
        self._harvesters: dict[str, Harvester] = {}
        self._starts: dict[str, _Start] = {}
        self._stops: list[threading.Thread] = []  # Of harvesters that are ending.
        self._search_error: str | None = None
        self._observed: ObservedTenants | None = None  # If OUTBOX_LISTEN is set.

    def _prepare(self, loop: asyncio.AbstractEventLoop | None) -> Callable[[], None]:  # noqa: ARG002
        with reported_as_refusal(self._settings):
            found = self._search()
        if self._settings.listen is not None:
            self._observed = self._listen(self._settings.listen)
        return partial(self._harvest, found)

    def _listen(self, listen: str) -> ObservedTenants:
        with metrics_extra():
            from outbox_plugin.observe.tenants import ObservedTenants
        return ObservedTenants(
            self._settings.table,
            self._settings.group,
            listen,
            running=lambda: self._schedule.running,
            failed=lambda: self._schedule.failed,
            error=lambda: str(self._error) if self._error else self._search_error,
            is_alive=lambda: self._error is None,
        )

    def stop(self) -> None:
        """Let all harvesters hand over, and end. Returns when everything is closed."""
        super().stop()
        observed, self._observed = self._observed, None
        if observed is not None:
            observed.close()

    def _search(self) -> Mapping[str, str | None]:
        with closing(connect(self._settings, purpose="outbox tenants")) as connection:
            return tenant_schemas(connection, self._settings.table)

    def _harvest(self, found: Mapping[str, str | None]) -> None:
        logger.info("%s: %d schema(s) with an outbox", self._settings.table, len(found))
        searched_at = time.monotonic()
        try:
            while True:
                self._follow(found, time.monotonic())
                if self._stop.wait(CHECK_SECONDS):
                    return
                self._take_failures()
                if time.monotonic() - searched_at >= SEARCH_SECONDS:
                    found, searched_at = self._search_again(found), time.monotonic()
        finally:
            self._stop_all()

    def _search_again(self, last: Mapping[str, str | None]) -> Mapping[str, str | None]:
        """The schemas that have outboxes now; the `last` ones while Postgres does not answer."""
        try:
            with reported():
                found = self._search()
        except (StoreUnavailable, ServerRefused) as error:
            if self._search_error is None:
                logger.warning("%s: the schemas cannot be looked up: %s", self._settings.table, error)
            self._search_error = str(error)
            return last
        self._search_error = None
        return found

    def _follow(self, found: Mapping[str, str | None], now: float) -> None:
        for schema, reason in found.items():
            if reason is not None and schema in self._harvesters:
                self._failed(schema, ServerRefused(reason))
        room = STARTS_AT_ONCE - sum(not start.is_slow(now) for start in self._starts.values())
        changes = self._schedule.changes(found, now, max(room, 0))
        for schema in changes.stop:
            logger.info("schema %s: its outbox is gone", schema)
            self._let_go(schema)
        for schema in changes.start:
            try:
                if (reason := found[schema]) is not None:
                    raise ServerRefused(reason)
                harvester = Harvester(self._settings.of_schema(schema), adopt=self._adopt)
                start = _Start(harvester, now)
            except Exception as error:  # Whatever it is, it is this tenant's own.
                self._failed(schema, error)
                continue
            self._harvesters[schema], self._starts[schema] = harvester, start

    def _take_failures(self) -> None:
        """Look for harvesters that could not start, or have ended by themselves."""
        for schema, start in [each for each in self._starts.items() if each[1].has_ended]:
            del self._starts[schema]
            if start.error is not None:
                self._failed(schema, start.error)
        for schema, harvester in list(self._harvesters.items()):
            if harvester.error is not None and schema not in self._starts:
                self._failed(schema, harvester.error)

    def _failed(self, schema: str, error: BaseException) -> None:
        self._let_go(schema)
        seconds = self._schedule.failed_at(schema, time.monotonic())
        if seconds is not None:
            logger.warning("schema %s: not harvested, tried again in %.0f s: %s", schema, seconds, error)

    def _let_go(self, schema: str) -> None:
        """Stop the schema's harvester, if it has one, also while it starts."""
        self._starts.pop(schema, None)
        if (harvester := self._harvesters.pop(schema, None)) is not None:
            self._stop_aside(harvester)

    def _stop_all(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        for harvester in self._harvesters.values():
            self._stop_aside(harvester)
        for stop in self._stops:
            stop.join(max(0.0, deadline - time.monotonic()))
        if left := sum(stop.is_alive() for stop in self._stops):
            logger.warning("%d harvester(s) have not ended within %.0f s", left, STOP_SECONDS)

    def _stop_aside(self, harvester: Harvester) -> None:
        """Stop a harvester on a thread of its own: it may wait for servers. On this thread if none can be started."""
        thread = threading.Thread(target=harvester.stop, name="outbox-tenant-stop", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            harvester.stop()
            return
        self._stops = [*(each for each in self._stops if each.is_alive()), thread]
