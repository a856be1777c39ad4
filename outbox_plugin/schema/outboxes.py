"""Which outboxes the settings name: one, several, or those of all schemas that a pattern matches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import psycopg

from outbox_plugin.errors import UserError
from outbox_plugin.printable import first_names, logger_of
from outbox_plugin.schema.connection import connect, errors_as_refusals
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings

logger = logger_of(__name__)

_UNTRUSTED = (
    "its owner {!r} may not create schemas in this database, so a pattern does not trust it; name the outbox in "
    "OUTBOX_OUTBOXES, or change the owner"
)
_COLLIDES = (
    "Kafka does not tell the names of its topics from those of schema {}, because $ becomes a dot there, and Kafka "
    "takes a dot and _ for the same; rename one of the two schemas"
)
_SPECIAL = re.compile(r"[\\%_]")


def tenant_schemas(connection: psycopg.Connection[tuple[Any, ...]], pattern: Settings) -> dict[str, str | None]:
    """The schemas that have a migrated outbox which the table of `pattern`, such as `tenant_*.outbox`, matches; sorted.

    Returns:
        By schema, why it must not be used; None where it may be. It may not if its owner is not trusted, or if it
        cannot have a group named after it, or one whose topics Kafka would not tell from another schema's.

    Raises:
        psycopg.Error: whatever Postgres says.
    """
    schema, _, name = pattern.table.partition(".")
    like = _SPECIAL.sub(r"\\\g<0>", schema).replace("*", "%")
    query = statement("place", "schemas", name)
    found = connection.execute(query, {"pattern": like, "name": name}).fetchall()
    refusals = {  # In the order in which the schemas were created.
        schema: pattern.refusal_of_schema(schema) if owner is None else _UNTRUSTED.format(owner)
        for schema, owner in found
    }
    collisions = _collisions([schema for schema, refusal in refusals.items() if refusal is None])
    return dict(sorted((refusals | collisions).items()))


def _collisions(schemas: Sequence[str]) -> dict[str, str]:
    """The schemas whose topics Kafka would not tell from those of an earlier one, with the reason.

    A $ of a schema is a . in the names of its topics, and Kafka takes a . and a _ for the same.

    Args:
        schemas: in the order in which they were created.
    """
    kept: dict[str, str] = {}
    collisions: dict[str, str] = {}
    for schema in schemas:
        other = kept.setdefault(schema.replace("$", "_"), schema)
        if other != schema:
            collisions[schema] = _COLLIDES.format(other)
    return collisions


def present_outboxes(settings: Settings) -> tuple[Settings, ...]:
    """The settings of every outbox that is there now. For those that come later, see `outbox_plugin.tenants`.

    A schema that is not trusted, or cannot have a group named after it, is left out, with a warning.

    Raises:
        ServerRefused: Postgres does not answer.
        UserError: no outbox matches.
        InvalidSetting: one of the `outboxes` of `settings` is wrong.
    """
    found: list[Settings] = []
    for each in settings.each():
        if not each.names_many:
            found.append(each)
            continue
        with errors_as_refusals(each), closing(connect(each, purpose="outbox tenants")) as connection:
            schemas = tenant_schemas(connection, each)
        for schema, reason in schemas.items():
            if reason is not None:
                logger.warning("schema %s is left out: %s", schema, reason)
        served = [each.of_schema(schema) for schema, reason in schemas.items() if reason is None]
        found += served
        if not served:
            _, _, name = each.table.partition(".")
            raise UserError(
                f"OUTBOX_TABLE: no schema has an outbox that {each.table!r} matches; create a schema's with "
                f"OUTBOX_TABLE=<schema>.{name} outbox migrate"
            )
    return tuple(found)


def by_name(outboxes: Sequence[Settings]) -> dict[str, Settings]:
    """Each outbox by its table; by table and group where tables of several databases are called alike."""
    tables = Counter(each.table for each in outboxes)
    return {each.table if tables[each.table] == 1 else f"{each.table} of {each.group}": each for each in outboxes}


def one_outbox(settings: Settings, name: str | None) -> Settings:
    """The outbox that a command concerns.

    Args:
        settings: may name several outboxes.
        name: one of the names of `by_name`; None for the only outbox.

    Raises:
        UserError: there are several outboxes and none was named, or none has that name.
        ServerRefused: Postgres does not answer.
    """
    if name is None and not settings.outboxes and not settings.names_many:
        return settings
    outboxes = by_name(present_outboxes(settings))
    if name is None and len(outboxes) > 1:
        raise UserError(
            f"the settings name {len(outboxes)} outboxes: say which with --outbox ({first_names(outboxes)})"
        )
    if name is None:
        [settings] = outboxes.values()
        return settings
    if name not in outboxes:
        raise UserError(f"--outbox: expected one of {first_names(outboxes)} (given: {name!r})")
    return outboxes[name]
