"""A Postgres with a synchronous standby, which replaces it when it dies."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from outbox_plugin.bench.proxy import Proxy
from outbox_plugin.embedded.postgres import EmbeddedPostgres
from outbox_plugin.embedded.server import ServerFailed

_SETTINGS = {
    "wal_keep_size": "512MB",  # A standby that was away for a while catches up without a replication slot.
    "wal_retrieve_retry_interval": "200ms",
    "hot_standby": "on",
}
_PATIENCE_SECONDS = 60.0


class ReplicatedPostgres:
    """A primary and its synchronous standby. Clients reach the primary through proxies, whose ports stay the same.

    A commit is acknowledged when the standby has it on disk, so a fail-over loses no commit that was acknowledged.
    While a new standby is being copied after a fail-over, the primary runs without one.
    """

    def __init__(self, folder: Path) -> None:
        """Nothing is started yet."""
        self._folder = folder
        self._number = 0
        self._standby: EmbeddedPostgres | None = None
        self._proxies: list[Proxy] = []
        self.primary = EmbeddedPostgres(folder / "0", _SETTINGS)

    def dsn_through(self, proxy: Proxy) -> str:
        """The URI of the database, reached through `proxy`, which leads to whoever is the primary from now on."""
        if proxy not in self._proxies:
            self._proxies.append(proxy)
            proxy.target = self.primary.port or 0
        return with_port(self.primary.dsn, proxy.port)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a primary, for as long as the body runs, and whatever standby it has been given."""
        try:
            self.primary.launch()
            self.primary.wait()
            yield
        finally:
            self.primary.stop()
            if self._standby is not None:
                self._standby.stop()

    def add_standby(self) -> None:
        """Copy the primary, start the copy as its standby, and make commits wait for it from then on.

        Raises:
            ServerFailed: it does not come, or does not catch up.
        """
        self._number += 1
        standby = self.primary.clone(self._folder / str(self._number))
        self._standby = standby
        standby.launch()
        standby.wait()
        self._wait("SELECT EXISTS (SELECT FROM pg_stat_replication WHERE state = 'streaming')")
        with closing(psycopg.connect(self.primary.dsn, autocommit=True)) as connection:
            # Only now: the standby must not inherit it, or it would wait for a standby of its own once it is promoted.
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
        self._wait("SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state = 'sync')")

    def stop_immediately(self) -> None:
        """Stop the primary as a power cut would."""
        self.primary.stop_immediately()

    def start_again(self) -> None:
        """Start the primary after `stop_immediately`. Returns when it has recovered.

        Raises:
            ServerFailed: it does not start.
        """
        self.primary.launch()
        self.primary.wait()
        self._lead_clients()

    def fail_over(self) -> None:
        """Kill the primary, promote the standby, and redirect all clients to it. Returns when it accepts writes.

        Raises:
            ServerFailed: there is no standby, or it does not catch up.
        """
        standby = self._standby
        if standby is None:
            raise ServerFailed("Postgres: there is no standby")
        # What a primary recovers after a crash is visible before its standby has it; commits made later never are.
        self._wait(
            "WITH now AS MATERIALIZED (SELECT pg_current_wal_flush_lsn() AS lsn) "
            "SELECT EXISTS (SELECT FROM pg_stat_replication, now WHERE sync_state = 'sync' AND flush_lsn >= now.lsn)"
        )
        old, self._standby = self.primary, None
        old.stop_immediately()
        standby.promote()
        self.primary = standby
        self._lead_clients()
        shutil.rmtree(old.folder, ignore_errors=True)

    def _lead_clients(self) -> None:
        for proxy in self._proxies:
            proxy.target = self.primary.port or 0

    def _wait(self, query: str) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        with closing(psycopg.connect(self.primary.dsn, autocommit=True)) as connection:
            while not (row := connection.execute(query.encode()).fetchone()) or not row[0]:
                if time.monotonic() > deadline:
                    raise ServerFailed(f"Postgres: the standby was not in sync within {_PATIENCE_SECONDS:.0f} s")
                time.sleep(0.02)


def with_port(dsn: str, port: int) -> str:
    """The URI `dsn` with another port."""
    parts = urlsplit(dsn)
    return parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{port}").geturl()
