"""Registers a harvester with its outbox in the database, before it touches a row.

It checks that the outbox table is as it must be. It registers the harvester's group, delivery and number of shards,
which the database remembers: another group or delivery is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from outbox_plugin.adapters.markings import ANY_SHARD, ENDINGS
from outbox_plugin.core.progress import OutboxIdentity
from outbox_plugin.core.recovery import TermHistory
from outbox_plugin.core.shards import Layout
from outbox_plugin.core.signing import Signer
from outbox_plugin.errors import ForeignOutbox, InvalidSetting, SchemaMissing, ServerRefused
from outbox_plugin.schema.columns import check_columns
from outbox_plugin.schema.connection import connect
from outbox_plugin.schema.statements import check_name, statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.settings import Settings


class RegistrationConnection:
    """The connection on which a harvester registers.

    A connection that was ended while it was idle looks open until it is used. That registration fails, and the next one
    connects again.
    """

    def __init__(self, settings: Settings) -> None:
        """No connection yet."""
        self._settings = settings
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None

    @contextmanager
    def registration(self, *, keep: bool = True) -> Iterator[HarvesterRegistration]:
        """A transaction that locks a row which every takeover needs. It is rolled back if `keep` is False.

        Postgres ends it if this process is stopped meanwhile, or if another session keeps the row locked.

        Raises:
            psycopg.Error: Postgres is away, or refuses.
        """
        if self.was_ended:
            self._connection = None  # If none can be made, it is not one that was ended.
        if self._connection is None:
            self._connection = connect(self._settings, purpose="outbox harvester (start)")
        with self._connection.transaction(force_rollback=not keep):
            self._connection.execute(statement("window", "registration_limits", self._settings.table))
            yield HarvesterRegistration(self._settings, self._connection)

    @property
    def was_ended(self) -> bool:
        """Whether Postgres or a pooler has ended the connection, as far as is known."""
        return self._connection is not None and self._connection.closed

    def close(self) -> None:
        """Disconnect. Safe to call twice."""
        if self._connection is not None:
            self._connection.close()


class HarvesterRegistration:
    """Checks the outbox, and registers the harvester, on a connection of the caller's.

    Every method raises psycopg.Error for other errors of Postgres.
    """

    def __init__(self, settings: Settings, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._settings = settings
        self._connection = connection
        self.table_with_schema = with_schema(connection, settings.table)

    def identity(self) -> OutboxIdentity:
        """The outbox's incarnation and place.

        Raises:
            SchemaMissing: the table, our trigger, or our own tables are missing.
            InvalidSetting: the table is known by another name.
        """
        settings = self._settings
        check_name(settings.table, self._ask("identity", "known_as"))
        found = self._ask("identity", "identity")
        if not found or found[0][2] is None:
            raise self._not_known()
        incarnation, place, is_same_table, notices_truncation = found[0]
        if not is_same_table:
            raise SchemaMissing(
                f"the table {settings.table!r} was dropped and recreated, or restored; run `outbox migrate` first"
            )
        if not notices_truncation:
            raise SchemaMissing(
                f"the table {settings.table!r} lacks the trigger `outbox_truncated`; run `outbox migrate` first"
            )
        return OutboxIdentity(incarnation, place)

    def check_outbox(self) -> OutboxIdentity:
        """Check that the outbox is there and as it must be. Returns its identity.

        Raises:
            SchemaMissing: the table, one of its columns, our trigger, or our own tables are missing, a column is of
                another type, its ids need not be unique, or no row of the table can be deleted.
            InvalidSetting: the table is known by another name.
            ServerRefused: our transactions are isolated otherwise than we need.
        """
        settings, identity = self._settings, self.identity()
        check_columns(self._connection, self.table_with_schema, settings.table)
        if not self._ask("identity", "unique_ids"):
            raise SchemaMissing(
                f"the table {settings.table!r} lets two rows have the same id, so one could be deleted for the other: "
                f"ALTER TABLE {settings.table} ADD PRIMARY KEY (id)"
            )
        if settings.delivery == "exactly-once":
            self._check_creation_times()
        self._check_isolation()
        for (keeper,) in self._ask("identity", "kept_rows"):
            raise SchemaMissing(
                f"{keeper} keeps the rows of the table {settings.table!r} from being deleted: each would be published "
                "again and again"
            )
        return identity

    def _check_creation_times(self) -> None:
        """A row is told by its time of creation: that must be to the microsecond, and stay.

        Raises:
            SchemaMissing: it is of another type, or a view shows another one at each read.
        """
        table = self._settings.table
        for (kind,) in self._ask("identity", "time_of_another_type"):
            raise SchemaMissing(
                f"the column create_time of {table!r} is a {kind}; exactly-once delivery tells rows by it, and "
                "expects a timestamp with time zone"
            )
        first, second = (dict(self._ask("identity", "first_creation")) for _ in range(2))
        if any(second.get(id_, created) != created for id_, created in first.items()):
            raise SchemaMissing(
                f"the column create_time of {table!r} is another one at each read: published rows could not be "
                "told, and would be published again. Let the view show when a row was inserted"
            )

    def _check_isolation(self) -> None:
        """A stricter isolation would show a statement what was there before it got its lock.

        Raises:
            ServerRefused: the role or the database has one.
        """
        [(isolation,)] = self._ask("identity", "isolation")
        if isolation != "read committed":
            raise ServerRefused(
                f"Postgres: default_transaction_isolation is {isolation!r} for the harvester's role, expected 'read "
                "committed': ALTER ROLE … SET default_transaction_isolation = 'read committed'"
            )

    def register_group(self, *, adopt: bool = False) -> None:
        """Check that our group harvests the outbox, and remember it in the database.

        With `adopt`, ours replaces the one that the database remembers, and leaders of the other one read nothing more.

        Raises:
            ForeignOutbox: another group harvests this outbox; our fence in Kafka would not stop it.
            SchemaMissing: the outbox is not known.
        """
        group, table = self._settings.group, self._settings.table
        remembered = self._remembered("register_group", group=group, adopt=adopt)
        if remembered != group:
            raise ForeignOutbox(
                f"the group {remembered!r} harvests the outbox {table!r}, not {group!r}. Set OUTBOX_GROUP to it; or, "
                "once none of its harvesters runs, start once with `outbox harvest --adopt`"
            )

    def register_delivery(self, *, adopt: bool = False) -> None:
        """Check that the outbox is harvested in our delivery, and remember it in the database.

        With `adopt`, ours replaces the one that the database remembers, and leaders of the other one read nothing more.

        Raises:
            InvalidSetting: harvesters of the other delivery may run. The two would publish rows beside each other.
            SchemaMissing: the outbox is not known.
        """
        delivery, table = self._settings.delivery, self._settings.table
        remembered = self._remembered("register_delivery", delivery=delivery, adopt=adopt)
        if remembered != delivery:
            raise InvalidSetting(
                f"OUTBOX_DELIVERY: the outbox {table!r} is harvested {remembered} (given: {delivery!r}). To change it, "
                "stop all its harvesters, then start one with `outbox harvest --adopt`"
            )

    def register_retention(self) -> None:
        """Remember for how long the outbox keeps published rows; who starts last, decides.

        Outboxes of one schema share the days of the history. A day is dropped when the longest of their times is over.
        """
        self._run("identity", "register_retention", keep=self._settings.retention or None)

    def _remembered(self, name: str, **values: object) -> str:
        """What the database remembers after the statement `name`.

        Raises:
            SchemaMissing: the outbox is not known; somebody may have dropped its tables since it was looked at.
        """
        for (remembered,) in self._ask("identity", name, **values):
            return str(remembered)
        raise self._not_known()

    def _not_known(self) -> SchemaMissing:
        return SchemaMissing(f"there is no outbox table {self._settings.table!r}; run `outbox migrate` first")

    def signer(self) -> Signer:
        """Sign and verify with the outbox's secret.

        Raises:
            SchemaMissing: it has none.
        """
        for (secret,) in self._ask("identity", "secret"):
            return Signer(secret)
        raise SchemaMissing(f"the outbox table {self._settings.table!r} has no secret; run `outbox migrate` first")

    def terms(self) -> TermHistory:
        """The last term that the database knows, number 0 where no leader has ever begun one.

        Raises:
            SchemaMissing: the outbox is not known.
        """
        for number, recorded, unsigned in self._ask("identity", "terms"):
            return TermHistory(number, recorded, frozenset(unsigned))
        raise self._not_known()

    def register_layout(self, *, keep: bool = True) -> Layout:
        """Give the outbox the number of shards that the settings name; who starts last, decides. Returns its layout.

        Args:
            keep: False if the caller undoes it. It then need not wait for marks.

        Raises:
            SchemaMissing: the outbox is not known.
            psycopg.errors.LockNotAvailable: a leader still marks rows, and its session cannot be ended.
        """
        if keep and self.layout().shards != self._settings.shards:
            self._wait_for_marks()
        self._run("control", "register_layout", shards=self._settings.shards)
        return self.layout()

    def _wait_for_marks(self) -> None:
        """Let no leader of the present layout mark rows any more, once the transaction is committed.

        A mark that ends later could take rows that a leader of the next layout has marked. A mark takes milliseconds,
        unless its leader is stopped, or somebody else has locked a row. If it takes long, its session is ended.
        """
        for attempt in range(1, ENDINGS + 1):
            try:
                with self._connection.transaction():
                    self._run("mark", "wait_a_little")
                    self._run("mark", "wait_for_marks", shard=ANY_SHARD)
                self._connection.execute(statement("window", "registration_limits", self._settings.table))
            except psycopg.errors.LockNotAvailable:
                if attempt == ENDINGS:
                    raise
                self._end_markings()
            else:
                return

    def _end_markings(self) -> None:
        for (pid,) in self._ask("mark", "markings", shard=ANY_SHARD):
            with suppress(psycopg.errors.InsufficientPrivilege), self._connection.transaction():
                self._run("mark", "end_session", pid=pid)

    def layout(self) -> Layout:
        """How many shards the outbox has.

        Raises:
            SchemaMissing: the outbox is not known.
        """
        found = self._ask("control", "layout")
        if not found:
            raise self._not_known()
        number, shards, unsettled, *_ = found[0]
        return Layout(number, shards, tuple(unsettled))

    def weaknesses(self) -> list[str]:
        """What keeps nobody from harvesting, but breaks a promise: ids out of order, a table that a crash empties."""
        table, found = self._settings.table, []
        if (disorder := self._disorder_of_ids()) is not None:
            found.append(
                f"the ids of {table} {disorder}. A later transaction can get a smaller id, so order per key is not kept"
            )
        if self._ask("identity", "unlogged"):
            found.append(
                f"the table {table} is UNLOGGED, so a crash of Postgres empties it: ALTER TABLE {table} SET LOGGED"
            )
        return found

    def _disorder_of_ids(self) -> str | None:
        """Why a later transaction can get a smaller id from the table's sequence; None where it cannot."""
        for ahead, step, cycles in self._ask("identity", "sequence_form"):
            if ahead > 1:
                return f"are drawn {ahead} at a time (the sequence's CACHE); set CACHE 1"
            if step < 0:
                return f"descend (the sequence's INCREMENT is {step}); set INCREMENT 1"
            if cycles:
                return "begin again at the sequence's end (CYCLE); set NO CYCLE"
        return None

    def has_row_security(self) -> bool:
        """Whether row level security is on for the outbox's rows, or for one of the tables beside it."""
        [(found,)] = self._ask("identity", "has_row_security")
        return bool(found)

    def has_wake_up_trigger(self, shard: int) -> bool:
        """Whether `outbox migrate --wake-up` has installed the trigger, and for this shard too."""
        [(wakes_up,)] = self._ask("wake_up", "wakes_up", shard=shard)
        return bool(wakes_up)

    def _ask(self, noun: str, name: str, **values: object) -> list[tuple[Any, ...]]:
        return self._run(noun, name, **values).fetchall()

    def _run(self, noun: str, name: str, **values: object) -> psycopg.Cursor[tuple[Any, ...]]:
        values["table"] = self._settings.table
        return self._connection.execute(statement(noun, name, self.table_with_schema), values)
