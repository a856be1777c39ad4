"""Harvests the outboxes of all schemas that a pattern matches, also of those that come later.

Each tenant has a harvester of its own, with a group of its own, so that one that is dropped, broken or locked harms
itself alone. `core.tenant_schedule` decides what is started and stopped, and `core.resting_tenants` which tenants rest.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from outbox_plugin.adapters.tenant_activity import TenantActivityReader
from outbox_plugin.adapters.tenant_wake_up import TenantWakeUp
from outbox_plugin.core.resting_tenants import ActivitySnapshot, RestingTenants
from outbox_plugin.core.tenant_schedule import TenantSchedule
from outbox_plugin.errors import ForeignOutbox, InvalidSetting, OutboxError, ProgressLost, SchemaMissing
from outbox_plugin.harvester import Harvester
from outbox_plugin.log_tenant import about_tenant, of_tenant
from outbox_plugin.observe.metrics_extra import metrics_extra
from outbox_plugin.printable import logger_of, one_line
from outbox_plugin.relay.events import HarvestEvent, TermBegan, TermFinished
from outbox_plugin.schema.connection import connect, errors_as_refusals, errors_as_unavailable
from outbox_plugin.schema.outboxes import tenant_schemas
from outbox_plugin.settings import Settings
from outbox_plugin.threads.background import Background

if TYPE_CHECKING:  # Importing it needs an extra.
    from outbox_plugin.observe.tenants_telemetry import TenantsTelemetry

logger = logger_of("outbox_plugin.harvester")

_Result = TypeVar("_Result")

SEARCH_SECONDS = 5.0  # Between two searches for schemas.
# Between two checks of the harvesters, and at least between the beginnings of two reads of their activity.
CHECK_SECONDS = 0.5
NOTIFIED_SECONDS = 0.02  # The same, where a writer has just notified us.
# Where tenants rest, so many run at once in a process: each takes about 23 threads, and some hundredths of a core while
# it starts.
MAX_AWAKE = 30
STARTS_AT_ONCE = 8  # Each is a connection to Postgres, and requests to Kafka.
SLOW_SECONDS = 10.0  # A start that takes longer waits for a lock, or for a server: others go on beside it.
# A term that ends with one of these ends with it again, until somebody acts. The check at a start refuses the harvester
# for the same, and disturbs nobody.
_LASTING_ERRORS = tuple(each.__name__ for each in (ForeignOutbox, InvalidSetting, ProgressLost, SchemaMissing))
STOP_SECONDS = 30.0  # For all harvesters together. One that is stuck in its start ends with the process.


class _Task(Generic[_Result]):
    """A call on a thread of its own, which does not keep the process from ending."""

    def __init__(
        self, name: str, call: Callable[[], _Result], now: float, at_end: Callable[[], None] = lambda: None
    ) -> None:
        """Begin the call.

        Args:
            name: of the thread.
            call: may wait for servers.
            now: the time.
            at_end: called on the thread once the call has ended.

        Raises:
            RuntimeError: no thread can be started.
        """
        self._call = call
        self._at_end = at_end
        self._began = now
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.result: _Result | None = None
        self.error: BaseException | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error
        self._has_ended.set()
        self._at_end()

    @property
    def has_ended(self) -> bool:
        """Whether it has succeeded or failed."""
        return self._has_ended.is_set()

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
        self._found: Mapping[str, str | None] = {}  # The schemas that have outboxes, as of the last search.
        self._search: _Task[Mapping[str, str | None]] | None = None  # The one under way.
        self._searched_at = 0.0
        self._search_error: str | None = None
        self._rest = None if settings.tenants_rest is None else RestingTenants(settings.tenants_rest)
        self._reader = TenantActivityReader(settings)
        self._reading: _Task[ActivitySnapshot] | None = None  # The one under way.
        self._read_at = float("-inf")  # When the last read began.
        self._read_error: str | None = None
        self._wake_up = TenantWakeUp(settings, self._notified)
        # The schemas that writers have named, from their notifications to the read that follows them.
        self._written: set[str] = set()
        self._written_lock = threading.Lock()
        self._harvesters: dict[str, Harvester] = {}
        self._stopped: dict[str, Harvester] = {}  # Of tenants at rest, and of those that made place.
        self._starts: dict[str, _Task[None]] = {}
        self._led: set[str] = set()  # The schemas that we have led: what is to be adopted has been.
        # By schema, the lasting errors that terms of its present harvester have ended with. Each harvester has a list
        # of its own: one that is being stopped may meet such an error when the next one runs already.
        self._lasting_errors: dict[str, list[str]] = {}
        self._check_now = threading.Event()  # Set when a read has ended, when a writer has notified us, and to stop.
        self._stops: list[threading.Thread] = []  # Of harvesters that are ending.
        self._observed: TenantsTelemetry | None = None  # If OUTBOX_LISTEN is set.

    def _prepare(self, loop: asyncio.AbstractEventLoop | None) -> Callable[[], None]:  # noqa: ARG002
        with errors_as_refusals(self._settings):
            self._found = self._schemas()
        if self._settings.listen is not None:
            self._observed = self._listen(self._settings.listen)
        return self._harvest

    def _listen(self, listen: str) -> TenantsTelemetry:
        with metrics_extra():
            from outbox_plugin.observe.tenants_telemetry import TenantsTelemetry
        return TenantsTelemetry(
            self._settings.table,
            self._settings.group,
            listen,
            running=lambda: self._schedule.running,
            resting=lambda: len(self._resting),
            waiting=lambda: self._schedule.waiting,
            failed=lambda: self._schedule.failed,
            error=lambda: str(self._error) if self._error else self._search_error or self._read_error,
            is_alive=lambda: self._error is None,
        )

    def stop(self) -> None:
        """Let all harvesters hand over, and end. Returns when everything is closed."""
        self._stop.set()
        self._check_now.set()
        super().stop()
        observed, self._observed = self._observed, None
        if observed is not None:
            observed.close()

    def _schemas(self) -> Mapping[str, str | None]:
        with closing(connect(self._settings, purpose="outbox tenants")) as connection:
            return tenant_schemas(connection, self._settings)

    def _schemas_again(self) -> Mapping[str, str | None]:
        with errors_as_unavailable():
            return self._schemas()

    def _harvest(self) -> None:
        logger.info("%s: %d schema(s) with an outbox", self._settings.table, len(self._found))
        self._searched_at = time.monotonic()
        try:
            while True:
                self._follow(time.monotonic())
                self._check_now.wait(self._seconds_between_reads)
                self._check_now.clear()
                if self._stop.is_set():
                    return
                self._take_failures()
                self._find_schemas(time.monotonic())
                if self._rest is not None:
                    self._poll_activity(self._rest, time.monotonic())
        finally:
            self._wake_up.close()
            self._stop_all()
            self._reader.close()

    def _find_schemas(self, now: float) -> None:
        """Search again from time to time, on another thread: while Postgres hangs, a stop must not wait for it."""
        if self._search is None:
            if now - self._searched_at >= SEARCH_SECONDS:
                try:
                    self._search = _Task("outbox-tenant-search", self._schemas_again, now)
                except RuntimeError as error:
                    self._not_found(str(error), now)
        elif self._search.has_ended:
            search, self._search = self._search, None
            if search.result is None:
                self._not_found(one_line(search.error or RuntimeError()), now)
            else:
                self._found, self._searched_at, self._search_error = search.result, now, None
        elif self._search.is_slow(now):
            self._not_found("Postgres does not answer", now)

    def _not_found(self, reason: str, now: float) -> None:
        """The last search failed. Its predecessor's schemas are harvested on."""
        if self._search_error is None:
            logger.warning("%s: the schemas cannot be looked up: %s", self._settings.table, reason)
        self._search_error, self._searched_at = reason, now

    @property
    def _resting(self) -> frozenset[str]:
        return frozenset() if self._rest is None else self._rest.resting

    def _notified(self, schemas: set[str]) -> None:
        """Writers say that they have inserted rows for these tenants at rest: look at once."""
        with self._written_lock:
            self._written |= schemas
        self._check_now.set()

    def _take_written(self) -> set[str]:
        with self._written_lock:
            written, self._written = self._written, set()
        return written

    @property
    def _seconds_between_reads(self) -> float:
        """At least so long after the beginning of one read of the tenants' activity, the next one begins."""
        return NOTIFIED_SECONDS if self._written else CHECK_SECONDS

    def _poll_activity(self, rest: RestingTenants, now: float) -> None:
        """See, on another thread, where events are emitted. Tenants that rest are woken for that by `_follow`."""
        if self._reading is not None and self._reading.has_ended:
            read, self._reading = self._reading, None
            if read.result is None:
                self._not_seen(one_line(read.error or RuntimeError()))
            else:
                self._read_error = None
                rest.update(read.result, now)
                self._listen_to_writers(rest.resting)
        if self._reading is None and now - self._read_at >= self._seconds_between_reads:
            self._read_at = now
            schemas = [schema for schema, refusal in self._found.items() if refusal is None]
            rest.follow(schemas)
            rest.note_writers(self._take_written())
            rest.set_crowded(is_crowded=self._schedule.is_crowded)
            call = partial(self._read_activity, schemas, rest, now)
            try:
                self._reading = _Task("outbox-tenant-activity", call, now, self._check_now.set)
            except RuntimeError as error:
                self._not_seen(str(error))
        elif self._reading is not None and self._reading.is_slow(now):
            self._not_seen("Postgres does not answer")

    def _listen_to_writers(self, resting: frozenset[str]) -> None:
        with suppress(RuntimeError):  # No thread can be started. The tenants are polled all the same.
            self._wake_up.follow(resting)

    def _read_activity(self, schemas: Sequence[str], rest: RestingTenants, now: float) -> ActivitySnapshot:
        """Read how active the tenants are. `rest` does not change meanwhile: no other read runs."""
        activity = self._reader.activity(schemas)
        return ActivitySnapshot(activity, self._reader.have_rows(rest.to_check(activity, now)))

    def _not_seen(self, reason: str) -> None:
        """The last read failed. Tenants at rest are not woken meanwhile."""
        if self._read_error is None:
            logger.warning("%s: it cannot be seen where events are emitted: %s", self._settings.table, reason)
        self._read_error = reason

    def _follow(self, now: float) -> None:
        """Do what the schedule decides."""
        room = STARTS_AT_ONCE - sum(not start.is_slow(now) for start in self._starts.values())
        places = None if self._rest is None else MAX_AWAKE
        changes = self._schedule.changes(self._found, now, max(room, 0), self._resting, places)
        for schema in changes.gone:
            with about_tenant(schema):
                logger.info("its outbox is gone")
            self._let_go(schema)
            if self._observed is not None:
                self._observed.forget(self._settings.group_of_schema(schema))
        for schema in changes.refused:
            with about_tenant(schema):
                logger.warning("not harvested: %s", self._found[schema])
            self._let_go(schema)
        for schema in changes.rest:
            with about_tenant(schema):
                logger.debug("at rest")
            self._let_rest(schema)
        for schema in changes.preempted:
            with about_tenant(schema):
                logger.debug("makes place for one that waits")
            self._let_rest(schema)
        for schema in changes.start:
            try:
                harvester = self._next_harvester(schema)
                start = _Task("outbox-tenant-start", of_tenant(schema, harvester.start), now)
            except Exception as error:  # Whatever it is, it is this tenant's own.
                self._failed(schema, _reason(error))
                continue
            self._harvesters[schema], self._starts[schema] = harvester, start

    def _take_failures(self) -> None:
        """Look for harvesters that could not start, have ended by themselves, or may not lead."""
        for schema, start in [each for each in self._starts.items() if each[1].has_ended]:
            del self._starts[schema]
            if start.error is not None:
                self._failed(schema, _reason(start.error))
        for schema, harvester in list(self._harvesters.items()):
            if schema in self._starts:
                continue
            if harvester.error is not None:
                self._failed(schema, _reason(harvester.error))
            elif reasons := self._lasting_errors.get(schema):
                self._failed(schema, reasons[0])

    def _failed(self, schema: str, reason: str) -> None:
        self._let_go(schema)
        retry = self._schedule.failed_at(schema, reason, time.monotonic())
        if retry is not None and retry.is_news:
            with about_tenant(schema):
                logger.warning("not harvested, tried again in %.0f s: %s", retry.seconds, reason)

    def _next_harvester(self, schema: str) -> Harvester:
        lasting_errors = self._lasting_errors[schema] = list[str]()
        observe = partial(self._observe, schema, lasting_errors)
        if (stopped := self._stopped.pop(schema, None)) is not None:
            return stopped.for_restart(observe)
        adopt = self._adopt and schema not in self._led
        return Harvester(self._settings.of_schema(schema), observe=observe, adopt=adopt)

    def _observe(self, schema: str, lasting_errors: list[str], event: HarvestEvent) -> None:
        """Take in what a harvester does, on its threads.

        Args:
            schema: that it harvests.
            lasting_errors: its own.
            event: what it does.
        """
        if isinstance(event, TermBegan):
            self._led.add(schema)
        if isinstance(event, TermFinished) and event.error_type in _LASTING_ERRORS:
            lasting_errors.append(event.reason or event.error_type)
            self._check_now.set()

    def _let_rest(self, schema: str) -> None:
        """Stop the schema's harvester, if it has one. It is restarted later."""
        harvester = self._harvesters.get(schema)
        self._let_go(schema)
        if harvester is not None:
            self._stopped[schema] = harvester

    def _let_go(self, schema: str) -> None:
        """Stop the schema's harvester, if it has one, also while it starts. It is not restarted."""
        self._starts.pop(schema, None)
        self._stopped.pop(schema, None)
        self._lasting_errors.pop(schema, None)
        if (harvester := self._harvesters.pop(schema, None)) is not None:
            self._stop_aside(schema, harvester)

    def _stop_all(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        for schema, harvester in self._harvesters.items():
            self._stop_aside(schema, harvester)
        for stop in self._stops:
            stop.join(max(0.0, deadline - time.monotonic()))
        if left := sum(stop.is_alive() for stop in self._stops):
            logger.warning("%d harvester(s) have not ended within %.0f s", left, STOP_SECONDS)

    def _stop_aside(self, schema: str, harvester: Harvester) -> None:
        """Stop a harvester on a thread of its own: it may wait for servers. On this thread if none can be started."""
        stop = of_tenant(schema, partial(_stop, harvester))
        thread = threading.Thread(target=stop, name="outbox-tenant-stop", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            stop()
            return
        self._stops = [*(each for each in self._stops if each.is_alive()), thread]


def _stop(harvester: Harvester) -> None:
    """Stop a harvester. An exception is logged, because it would be lost with its thread."""
    try:
        harvester.stop()
    except Exception as error:
        logger.error("its harvester did not stop as it should: %s", _reason(error))


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, OutboxError) else f"unexpected: {error!r}"
