"""What an inbox does beside handling: it fetches dead letters that are to be tried again, and cleans."""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing
from typing import Any

import psycopg

from outbox_plugin.inbox.board import Board
from outbox_plugin.inbox.cleaning import Keep, clean
from outbox_plugin.inbox.dead_letters import to_retry
from outbox_plugin.printable import logger_of
from outbox_plugin.schema.connection import connect, one_line
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.inbox")

RETRY_SECONDS = 1.0
CLEAN_SECONDS = 60.0
TROUBLE_SECONDS = 5.0


class Housekeeping:
    """A thread with a connection of its own."""

    def __init__(self, settings: Settings, group: str, board: Board, keep: Keep) -> None:
        self._settings = settings
        self._group = group
        self._board = board
        self._keep = keep
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, name="outbox-inbox-housekeeping", daemon=True)

    def start(self) -> None:
        """Start."""
        self._thread.start()

    def stop(self) -> None:
        """End, and close the connection."""
        self._stop.set()
        self._thread.join()

    def _live(self) -> None:
        while not self._stop.is_set():
            try:
                with closing(connect(self._settings, purpose="outbox inbox (housekeeping)")) as connection:
                    self._keep_house(connection)
            except psycopg.Error as error:
                logger.warning("housekeeping waits for Postgres: %s", one_line(error))
                self._stop.wait(TROUBLE_SECONDS)

    def _keep_house(self, connection: psycopg.Connection[Any]) -> None:
        clean_at = time.monotonic()
        while not self._stop.is_set():
            if places := self._board.places():
                self._board.add(to_retry(connection, self._settings, self._group, places))
            if time.monotonic() >= clean_at and not clean(connection, self._settings, self._group, self._keep):
                clean_at = time.monotonic() + CLEAN_SECONDS * random.uniform(0.5, 1.5)  # noqa: S311
            self._stop.wait(RETRY_SECONDS)
