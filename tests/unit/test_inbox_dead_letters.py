"""What `outbox inbox list` shows of the error that made an event a dead letter."""

from __future__ import annotations

import traceback

import pytest

from outbox_plugin.inbox.dead_letters import exception_line

POSTGRES = 'relation "account" does not exist\nLINE 1: UPDATE account SET orders = 1\n               ^'


def kept(error: Exception) -> str:
    """The traceback, as an inbox keeps it."""
    return "".join(traceback.format_exception(error))


def raised(message: str, cause: Exception | None = None) -> Exception:
    try:
        raise ValueError(message) from cause
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (kept(raised("no")), "ValueError: no"),
        (kept(raised(POSTGRES)), 'ValueError: relation "account" does not exist'),
        (kept(raised("the second", raised("the first"))), "ValueError: the second"),
        (kept(ValueError("never raised")), "ValueError: never raised"),
        (kept(raised(""))[-25:], "ValueError"),  # The beginning of a long traceback is cut off.
        ("\n", ""),
    ],
)
def test_the_line_that_names_the_exception_is_shown(error: str, shown: str) -> None:
    assert exception_line(error) == shown
