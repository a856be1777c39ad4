"""Whether Postgres answers this process."""

from __future__ import annotations

from contextlib import closing, suppress

from outbox_plugin.errors import ServerRefused, ServerUnavailable
from outbox_plugin.schema.connection import connect, errors_as_unavailable
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings


def postgres_answers(settings: Settings) -> bool:
    """Whether Postgres answers on a new connection, and is no standby, which lets nobody lead."""
    with (
        suppress(ServerUnavailable, ServerRefused),
        errors_as_unavailable(),
        closing(connect(settings, purpose="outbox harvester (probe)")) as connection,
    ):
        [(_, is_standby)] = connection.execute(statement("window", "snapshot", settings.table)).fetchall()
        return not is_standby
    return False
