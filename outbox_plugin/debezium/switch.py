"""The change-over from Debezium: each row is relayed by one of the two, and the rows of a key stay in order.

One transaction gives new rows a place in the outbox's order, and takes the table out of Debezium's publication. It
waits for all open transactions that have written to the table. So Debezium relays exactly the rows that were written
before it. The harvesters are paused until Debezium has read these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg import sql

from outbox_plugin.debezium.event_router import EventRouter, InvalidConnector
from outbox_plugin.debezium.outbox_view import PLACE, Column, OutboxView
from outbox_plugin.errors import SchemaMissing, ServerRefused
from outbox_plugin.operate.operator_transaction import notifying_transaction
from outbox_plugin.operate.pausing import resume
from outbox_plugin.printable import one_line
from outbox_plugin.schema.connection import command_connection
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.settings import Settings

PATIENCE_SECONDS = 60.0  # How long to wait for a lock on the table.
DRAIN_SECONDS = 600.0  # How long to wait until Debezium has read its last rows.
PAUSE_SECONDS = 1.0  # How often to check.

_PLAIN = "r"  # The relkind of an ordinary table: not partitioned, not foreign, and not a view.
_Connection = psycopg.Connection[tuple[Any, ...]]


def outbox_view(settings: Settings, router: EventRouter) -> OutboxView:
    """The statements for the table that `router` names and the view that `settings` name. Looks up the columns.

    Raises:
        InvalidConnector: there is no such table, or its records cannot be made as the router makes them.
        ServerRefused: Postgres cannot be reached, or refuses.
        StoreUnavailable: Postgres went away meanwhile.
    """
    with command_connection(settings, is_patient=True) as connection:
        kinds = _ask(connection, "kind", router)
        if not kinds:
            raise InvalidConnector(f"table.include.list: there is no table {router.schema}.{router.table}")
        if kinds != [(_PLAIN, False)]:
            raise InvalidConnector(
                f"table.include.list: {router.schema}.{router.table} is partitioned or a partition, has tables that "
                "inherit from it, or is not a table: expected a plain table, whose places can be unique"
            )
        columns = [Column(*row) for row in _ask(connection, "columns", router)]
        writers = [writer for (writer,) in _ask(connection, "writers", router)]
        name = with_schema(connection, settings.table).rsplit(".", 1)
        _check_name(connection, settings, router)
        view = OutboxView(router, columns, writers, name, _columns_of_view(connection, name))
        _check_encoding(connection, view)
        _check_sequence(connection, router, view)
        _check_owner(connection, router)
        _check_insertion(connection, router)
        return view


def switch(settings: Settings, router: EventRouter, tell: Callable[[str], None]) -> None:
    """Change over, and wait until Debezium has read its last rows. If it is interrupted, it can be run again.

    Args:
        settings: name the view, which must have been migrated.
        router: of the connector.
        tell: called with each step of progress.

    Raises:
        InvalidConnector: the table cannot leave the connector's publication, or the connector's slot does not exist.
        SchemaMissing: the view has not been migrated.
        ServerRefused: Postgres cannot be reached, or refuses; somebody keeps the table locked; or Debezium does not
            read. The harvesters stay paused.
        StoreUnavailable: Postgres went away meanwhile. The harvesters stay paused.
    """
    view = outbox_view(settings, router)
    statements = view.switch()
    with command_connection(settings, is_patient=True) as connection:
        _check_view(connection, settings, router)
        _check_publication(connection, router)
        _check_slot(connection, router)
        _check_messages(router)
        _check_deletable(connection, view)
        _hold(settings)
        if _ask(connection, "has_switched", router, column=PLACE):
            tell("the table was switched before; new rows wait in the outbox")
        else:
            _switch(connection, statements, tell)
            tell("new rows wait in the outbox from now on, and Debezium reads no more of them")
        _wait_for_debezium(connection, router, tell)
    resume(settings)
    tell("Debezium has read all of its rows, and the harvester relays new ones from now on; delete the connector")


def _check_encoding(connection: _Connection, view: OutboxView) -> None:
    """Raises InvalidConnector if headers could be texts that Postgres cannot write in UTF-8: reads would fail."""
    encoding = connection.info.parameter_status("server_encoding")
    if view.makes_whole_records and encoding != "UTF8":
        raise InvalidConnector(
            "table.include.list: timestamps and partitions of records, and keys that are bytes, need a database in the "
            f"encoding UTF8 (given: {encoding})"
        )


def _columns_of_view(connection: _Connection, name: Sequence[str]) -> list[Column]:
    """The columns of the view that is there by this name; none if there is no such view."""
    base = sql.Identifier(*name).as_string()
    return [Column(*row) for row in connection.execute(statement("debezium", "columns", base), {"base": base})]


def _check_name(connection: _Connection, settings: Settings, router: EventRouter) -> None:
    """Raises InvalidConnector if something else has the name of the view."""
    if _stored(connection, settings) not in (None, (router.schema, router.table, True)):
        raise InvalidConnector(
            f"OUTBOX_TABLE: {settings.table!r} exists, and is not a view of {router.schema}.{router.table}: expected a "
            "name for a new view"
        )


def _check_sequence(connection: _Connection, router: EventRouter, view: OutboxView) -> None:
    """Raises InvalidConnector if something else has the name of the view's sequence."""
    if _ask(connection, "sequence_of_another", router, sequence=view.sequence):
        raise InvalidConnector(
            f"table.include.list: the sequence {view.sequence} exists, and does not belong to "
            f"{router.schema}.{router.table}: rename it"
        )


def _stored(connection: _Connection, settings: Settings) -> tuple[str | None, str | None, bool] | None:
    """The schema and the name of the table in which the outbox's rows are stored, and whether the outbox is a view.

    None if there is no outbox.
    """
    return connection.execute(statement("identity", "stored", with_schema(connection, settings.table))).fetchone()


def _check_owner(connection: _Connection, router: EventRouter) -> None:
    """Raises ServerRefused if another role owns the table: the sequence must have the table's owner."""
    for owner, given in _ask(connection, "other_owner", router):
        raise ServerRefused(
            f"Postgres: {router.schema}.{router.table} belongs to {owner!r}: connect as that role (given: {given!r}), "
            "or become it by options=-c%20role=… in OUTBOX_DSN"
        )


def _check_insertion(connection: _Connection, router: EventRouter) -> None:
    """Raises InvalidConnector if a trigger or rule would fire again when a deleted row is put back."""
    for (fires,) in _ask(connection, "fires_again", router):
        raise InvalidConnector(
            f"table.include.list: {fires} on {router.schema}.{router.table} would fire again for each row that is "
            "deleted at once and put back: drop it, or let a trigger fire only WHEN (pg_trigger_depth() = 0)"
        )


def _check_view(connection: _Connection, settings: Settings, router: EventRouter) -> None:
    """Raises SchemaMissing unless the outbox is a view of the router's table, and writers may use the sequence."""
    table = with_schema(connection, settings.table)
    if _stored(connection, settings) != (router.schema, router.table, True):
        raise SchemaMissing(
            f"OUTBOX_TABLE: {settings.table!r} is not a view of {router.schema}.{router.table}; run the SQL of "
            "`outbox debezium prepare`, and then `outbox migrate`"
        )
    if not connection.execute(statement("identity", "unique_ids", table)).fetchall():
        raise SchemaMissing(
            f"the places of {router.schema}.{router.table} have no valid unique index: drop the invalid one, and run "
            "the SQL of `outbox debezium prepare` again"
        )
    for (role,) in connection.execute(statement("debezium", "cannot_draw", table), _names(router)):
        raise ServerRefused(
            f"Postgres: the role {role!r}, which may insert into {router.schema}.{router.table}, has no USAGE on the "
            "sequence of the places, and could no longer insert: GRANT it, or run the SQL of `outbox debezium prepare` "
            "again"
        )
    if connection.execute(statement("debezium", "hidden_rows", table)).fetchall():
        raise ServerRefused(
            f"Postgres: row level security can hide rows of {router.schema}.{router.table} from the view, but not from "
            "Debezium: give the view's owner BYPASSRLS, or a policy USING (true)"
        )


def _check_publication(connection: _Connection, router: EventRouter) -> None:
    """Raises InvalidConnector unless the table can leave the publication permanently, or has left it."""
    if router.makes_publication:
        raise InvalidConnector(
            "publication.autocreate.mode: expected 'disabled', because a connector that is restarted adds the table to "
            "its publication again, and relays all rows: set it, and restart the connector"
        )
    found = _ask(connection, "publication", router, publication=router.publication)
    if not found:
        raise InvalidConnector(f"publication.name: there is no publication {router.publication!r}")
    [(names_it, has_it, has_schema, is_partial)] = found
    if has_schema or (has_it and not names_it):
        raise InvalidConnector(
            f"publication.name: {router.publication!r} contains all tables, or all tables of a schema, so a single "
            "table cannot leave it: let the connector read a publication that names its tables"
        )
    if is_partial:
        raise InvalidConnector(
            f"publication.name: {router.publication!r} omits rows or columns of the table, which the outbox would "
            "relay: expected all rows and columns"
        )
    if has_it and _ask(connection, "has_switched", router, column=PLACE):
        raise InvalidConnector(
            f"publication.name: {router.publication!r} contains the table again, though it was switched: each row "
            f"would be relayed twice; ALTER PUBLICATION … DROP TABLE {router.schema}.{router.table}"
        )


def _check_deletable(connection: _Connection, view: OutboxView) -> None:
    """Raises InvalidConnector if another publication keeps the table's rows from being marked or deleted.

    EXPLAIN fails in that case, as the statement itself would, and changes nothing.
    """
    try:
        with connection.transaction(force_rollback=True):
            for probe in view.deletion():
                connection.execute(probe)
    except psycopg.errors.ObjectNotInPrerequisiteState as error:
        raise InvalidConnector(
            "table.include.list: expected a table with a primary key or another replica identity, because a second "
            f"publication contains it: {one_line(error)}"
        ) from None


def _hold(settings: Settings) -> None:
    with notifying_transaction(settings) as transaction:
        if transaction.run("debezium", "hold").fetchone() is None:
            raise SchemaMissing(f"the view {settings.table!r} is not known; run `outbox migrate` first")


def _switch(connection: _Connection, statements: Sequence[sql.Composed], tell: Callable[[str], None]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with connection.transaction():
                connection.execute("SET LOCAL lock_timeout = '1s'")
                for change in statements:
                    connection.execute(change)
            return
        except psycopg.errors.LockNotAvailable:
            if time.monotonic() > deadline:
                raise ServerRefused(
                    f"Postgres: somebody has kept the table locked for {PATIENCE_SECONDS:.0f} s, so nothing was "
                    "switched, and Debezium goes on: end that session, or that transaction of pg_prepared_xacts, and "
                    "run this again; the outbox stays paused"
                ) from None
            tell("waiting for a transaction that keeps the table locked")
            time.sleep(PAUSE_SECONDS)


def _check_slot(connection: _Connection, router: EventRouter) -> None:
    """Raises InvalidConnector unless the connector's slot exists."""
    if not _ask(connection, "slot", router, slot=router.slot):
        raise InvalidConnector(f"slot.name: there is no replication slot {router.slot!r} for this database")


def _check_messages(router: EventRouter) -> None:
    """Raises InvalidConnector if the connector could not write the messages by which we follow its progress."""
    if name := router.bytes_only:
        raise InvalidConnector(
            f"{name}: expected io.debezium.converters.BinaryDataConverter with "
            f"{name}.delegate.converter.type=org.apache.kafka.connect.json.JsonConverter, because a converter "
            "of bytes alone fails at the messages that this writes to the WAL: set both, and restart the connector"
        )


def _wait_for_debezium(connection: _Connection, router: EventRouter, tell: Callable[[str], None]) -> None:
    [(position,)] = _ask(connection, "log_position", router)
    deadline = time.monotonic() + DRAIN_SECONDS
    while True:
        found = _ask(connection, "behind", router, slot=router.slot, position=position)
        behind, is_active = found[0] if found else (0, False)
        if not found:
            raise ServerRefused(f"Postgres: the slot {router.slot!r} was dropped before Debezium had read all its rows")
        if behind == 0:
            return
        state = "has" if is_active else "does not run, and has"
        backlog = f"Debezium {state} {behind:,} bytes of the WAL to read"
        if time.monotonic() > deadline:
            raise ServerRefused(
                f"Postgres: after {DRAIN_SECONDS:.0f} s, {backlog}; the outbox stays paused: check the connector, "
                "and run this again"
            )
        tell(backlog)
        _ask(connection, "nudge", router)
        time.sleep(PAUSE_SECONDS)


def _ask(connection: _Connection, name: str, router: EventRouter, **values: object) -> Sequence[tuple[Any, ...]]:
    table = f"{router.schema}.{router.table}"
    return connection.execute(statement("debezium", name, table), {**_names(router), **values}).fetchall()


def _names(router: EventRouter) -> dict[str, object]:
    base = sql.Identifier(router.schema, router.table).as_string()
    return {"base": base, "schema": router.schema, "name": router.table}
