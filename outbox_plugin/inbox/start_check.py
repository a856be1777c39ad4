"""Checks settings, servers and tables before an inbox starts, so that a user learns at once what to mend."""

from __future__ import annotations

from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.errors import InvalidSetting
from outbox_plugin.inbox.positions import Positions
from outbox_plugin.insecure_settings import warn_about_insecure_settings
from outbox_plugin.schema.connection import connect, errors_as_refusals
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.settings import Settings

_RESET, _FROM_THE_BEGINNING = "auto.offset.reset", {"earliest", "smallest", "beginning"}


def check_servers(settings: Settings, group: str) -> tuple[Settings, Positions]:
    """Check both servers, and the tables of `outbox migrate`.

    Returns:
        The settings, whose table has its schema, and the positions of the group.

    Raises:
        UserError: a setting, a server or the schema is not as it must be.
    """
    start = settings.kafka.get(_RESET, "earliest")
    if start not in _FROM_THE_BEGINNING:
        raise InvalidSetting(
            f"OUTBOX_KAFKA: {_RESET}={start} would let an inbox pass over events; "
            "to start at the end, set the group's offsets there before it starts"
        )
    warn_about_insecure_settings(settings)
    KafkaAdmin.at_start(settings).close()
    with errors_as_refusals(settings), connect(settings, purpose="outbox inbox (start)") as connection:
        table = with_schema(connection, settings.table)
        settings = settings.model_copy(update={"table": table})
        connection.execute(statement("inbox", "letters", table), {"group": group, "limit": 0})
        connection.execute(statement("inbox", "is_migrated", table))
        positions = Positions(settings, group)
        positions.read(connection, {})
    return settings, positions
