"""Housekeeping of an inbox: it writes positions, fetches dead letters that are tried again, and cleans."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg

from outbox_plugin.inbox.dead_letters import to_retry
from outbox_plugin.inbox.dispatcher import Dispatcher
from outbox_plugin.inbox.key_queues import KeyQueues
from outbox_plugin.inbox.positions import PartitionPositions, Positions
from outbox_plugin.inbox.retention import Retention, clean
from outbox_plugin.printable import logger_of, one_line
from outbox_plugin.schema.connection import CANCEL_SECONDS, cancel_until_ended, connect
from outbox_plugin.settings import Settings

if TYPE_CHECKING:  # It needs an extra.
    from outbox_plugin.inbox.inbox_telemetry import InboxTelemetry

logger = logger_of("outbox_plugin.inbox")

RETRY_SECONDS = 1.0
CLEAN_SECONDS = 60.0
TROUBLE_SECONDS = 5.0
END_SECONDS = 2.0  # After that, a statement that cannot be cancelled is left to end with its thread.


class Housekeeping:
    """A thread with its own connection, which runs beside the handlers."""

    def __init__(
        self,
        settings: Settings,
        group: str,
        dispatcher: Dispatcher,
        positions: Positions,
        reached: Callable[[], PartitionPositions],
        keep: Retention,
        telemetry: InboxTelemetry | None = None,
    ) -> None:
        """Nothing is connected yet.

        Args:
            settings: which database.
            group: the consumer group.
            dispatcher: gets the dead letters that are tried again.
            positions: where positions are written.
            reached: returns the positions that are to be written now.
            keep: how long things are kept.
            telemetry: is told whether Postgres answers.
        """
        self._settings = settings
        self._group = group
        self._dispatcher = dispatcher
        self._positions = positions
        self._reached = reached
        self._keep = keep
        self._telemetry = telemetry
        self._stop = threading.Event()
        self._connection: psycopg.Connection[Any] | None = None
        self._thread = threading.Thread(target=self._live, name="outbox-inbox-housekeeping", daemon=True)
        self._canceller = threading.Thread(target=self._cancel, name="outbox-inbox-cancel", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end, and cancel its statement; another process can do its work later."""
        self._stop.set()
        self._canceller.start()

    def wait_until_ended(self) -> bool:
        """Wait for the end of the thread, 2 seconds at most. Returns whether it has ended."""
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            return False
        self._canceller.join(CANCEL_SECONDS)
        return True

    def _cancel(self) -> None:
        cancel_until_ended(lambda: self._connection, self._has_ended, END_SECONDS)

    def _has_ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _live(self) -> None:
        """Run until it is stopped, whatever fails: nobody would notice a housekeeping that has ended."""
        while not self._stop.is_set():
            try:
                with closing(connect(self._settings, purpose="outbox inbox (housekeeping)")) as connection:
                    self._connection = connection
                    self._keep_house(connection)
            except Exception as error:
                if not self._stop.is_set():
                    waits = "waits for Postgres" if isinstance(error, psycopg.Error) else "failed, and is tried again"
                    logger.warning("housekeeping %s: %s", waits, one_line(error))
                    if self._telemetry is not None:
                        self._telemetry.postgres_failed(one_line(error))
                self._stop.wait(TROUBLE_SECONDS)
            finally:
                self._connection = None

    def _keep_house(self, connection: psycopg.Connection[Any]) -> None:
        clean_at = write_at = time.monotonic()
        while not self._stop.is_set():
            self._positions.write(connection, self._reached, unchanged=time.monotonic() >= write_at)
            if time.monotonic() >= write_at:
                write_at = time.monotonic() + CLEAN_SECONDS
            partitions = self._dispatcher.locked(KeyQueues.partitions)
            if partitions or self._telemetry is not None:  # Without partitions it finds none, but Postgres answers.
                self._dispatcher.add(to_retry(connection, self._settings, self._group, partitions))
            if self._telemetry is not None:
                self._telemetry.postgres_answered()
            if time.monotonic() >= clean_at and not clean(connection, self._settings, self._group, self._keep):
                clean_at = time.monotonic() + CLEAN_SECONDS * random.uniform(0.5, 1.5)  # noqa: S311
            self._stop.wait(RETRY_SECONDS)
