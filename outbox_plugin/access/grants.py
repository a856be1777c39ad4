"""A role's rights in Postgres, as SQL that the owner of the tables runs."""

from __future__ import annotations

import psycopg
from psycopg import sql

from outbox_plugin.access.roles import Role
from outbox_plugin.errors import ServerRefused
from outbox_plugin.schema.connection import command_connection
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.settings import Settings


def postgres_grants(settings: Settings, role: Role, database_role: str) -> str:
    """The SQL that gives an existing database role the rights that `role` needs.

    It reads the catalog, to qualify the names of tables and the sequence, and changes nothing.

    Args:
        settings: name the server and the outbox, which has been migrated.
        role: what the program or the person does.
        database_role: the role of Postgres that gets the rights.

    Raises:
        ServerRefused: the database cannot be reached, or its outbox has not been migrated.
        StoreUnavailable: Postgres went away meanwhile.
    """
    with command_connection(settings, purpose="outbox grants") as connection:
        table = with_schema(connection, settings.table)
        if not connection.execute(statement("migrate", "exists", table)).fetchall():
            raise ServerRefused(f"Postgres: there is no outbox {table}; run `outbox migrate` first")
        sequence = connection.execute(statement("grants", "sequence", table)).fetchone()
        if sequence is None:
            raise ServerRefused(f"Postgres: no sequence of {table}'s own generates its ids; write the GRANTs by hand")
        return _written(connection, table, role, database_role, sequence)


def _written(
    connection: psycopg.Connection[tuple[object, ...]],
    table: str,
    role: Role,
    database_role: str,
    sequence: tuple[object, ...],
) -> str:
    schema = table.rpartition(".")[0]
    composed = statement(
        "grants",
        role.value,
        table,
        role=sql.Identifier(database_role),
        schema=sql.Identifier(schema),
        sequence=sql.Identifier(*map(str, sequence)),
    )
    return composed.as_string(connection)
