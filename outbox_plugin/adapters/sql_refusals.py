"""Recognizes the errors by which Postgres refuses a row, as opposed to those of a server in trouble."""

from __future__ import annotations

import psycopg

# Classes of SQLSTATE (Postgres' manual, appendix A): errors that come again when it is tried later.
_OF_A_ROW = {"22", "23", "38", "39", "44", "54", "P0"}  # Data, constraints, functions, views, limits, RAISE.
_OF_THE_STATEMENT = {"0A", "42"}  # Unsupported; a table that is not there, a privilege that is missing.


def is_refusal(error: BaseException | None) -> bool:
    """Whether `error` says that a row cannot be written, now or later."""
    return _class_of(error) in _OF_A_ROW | _OF_THE_STATEMENT


def concerns_all_rows(error: BaseException | None) -> bool:
    """Whether such an error would come for every other row, too."""
    return _class_of(error) in _OF_THE_STATEMENT


def _class_of(error: BaseException | None) -> str | None:
    """The class of a SQLSTATE; None for anything else."""
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    return state[:2] if state else None


def storable(text: str) -> str:
    """`text` as Postgres can hold it: without NUL, and without halves of surrogate pairs."""
    return text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()
