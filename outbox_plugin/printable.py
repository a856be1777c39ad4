"""Foreign text for logs and terminals: without control characters, and errors in one line.

Keys, topics, headers and the reasons that name them come from anybody who may insert a row. A newline in one would
forge a line of the log, and a terminal would execute an escape sequence. Output for programs (JSON, the tables, the
records) is never changed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from itertools import islice

from outbox_plugin.log_tenant import name_tenant

_NAMED = 5  # How many names a message has, so that it stays one line.


def printable(text: str) -> str:
    r"""`text` on one line, with characters that are not printable replaced by escapes, such as \x1b, \n or \u202e."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def first_names(names: Collection[str]) -> str:
    """The first names, separated by commas; an ellipsis stands for the others."""
    return ", ".join([*islice(names, _NAMED), *(["…"] if len(names) > _NAMED else [])])


def one_line(error: BaseException) -> str:
    """The first line of the error's message; its class if it has no message, or fails to make one."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # The `__str__` of a user's class may fail.
        lines = []
    return lines[0] if lines else type(error).__name__


def logger_of(name: str) -> logging.Logger:
    """The logger of that name. Whatever handles its records, they are printable, and name the tenant, if any."""
    logger = logging.getLogger(name)
    logger.addFilter(name_tenant)
    logger.addFilter(_make_printable)
    return logger


def _make_printable(record: logging.LogRecord) -> bool:
    """Make the arguments of `record` printable. Its message is ours, and stays as it is."""
    if isinstance(record.args, tuple):
        record.args = tuple(each if isinstance(each, int | float) else printable(str(each)) for each in record.args)
    return True
