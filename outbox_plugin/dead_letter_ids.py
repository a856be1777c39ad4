"""The ids that an operator gives on the command line: of dead letters of the outbox and of the inbox."""

from __future__ import annotations

from collections.abc import Collection

import click

from outbox_plugin.errors import UserError

ROW_ID = click.IntRange(1, 2**63 - 1)  # Postgres's BIGINT, of which a sequence draws no number below 1.


def all_were_there(wanted: Collection[int] | None, found: Collection[int]) -> None:
    """Raises UserError if `wanted` names dead letters that are not in `found`; None wants all that there are."""
    if missing := sorted(set(wanted or ()) - set(found)):
        raise UserError(f"there is no dead letter {', '.join(map(str, missing))}")
