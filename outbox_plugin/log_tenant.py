"""Names the tenant in the log lines of its harvester, where one process harvests many.

The name is a variable of the thread's context. A thread that a harvester starts gets it from the thread that starts it.
Other variables of the context are not copied: a span that was open when the harvester started is not its parent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_schema: ContextVar[str | None] = ContextVar("schema", default=None)


@contextmanager
def about_tenant(schema: str) -> Iterator[None]:
    """What is logged in this context names the tenant's schema."""
    before = _schema.set(schema)
    try:
        yield
    finally:
        _schema.reset(before)


def of_tenant(schema: str, call: Callable[[], None]) -> Callable[[], None]:
    """`call`; what it logs names the tenant's schema."""

    def named() -> None:
        with about_tenant(schema):
            call()

    return named


def of_same_tenant(call: Callable[[], None]) -> Callable[[], None]:
    """`call`, for another thread: what it logs there names the tenant that is named here."""
    schema = _schema.get()
    return call if schema is None else of_tenant(schema, call)


def name_tenant(record: logging.LogRecord) -> bool:
    """Begin the record's message with the tenant's schema, and give it the field `schema`. True: it is logged."""
    if (schema := _schema.get()) is not None and isinstance(record.args, tuple):
        text = record.msg if record.args else str(record.msg).replace("%", "%%")
        record.msg, record.args, record.schema = f"schema %s: {text}", (schema, *record.args), schema
    return True
