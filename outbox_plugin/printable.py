"""Text of others on its way to a log or a terminal: control characters are shown, and do nothing.

Keys, topics, headers and the reasons that name them come from whoever may insert a row. A newline in one would forge a
line of the log, and an escape sequence would be obeyed by the terminal that shows it. What is meant for machines (JSON,
the tables, the records) is never changed.
"""

from __future__ import annotations

import logging


def printable(text: str) -> str:
    r"""`text` on one line, with each character that is not printable as an escape, such as \x1b, \n or \u202e."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def logger_of(name: str) -> logging.Logger:
    """The logger of that name; whatever is logged with it is printable, whoever handles the records."""
    logger = logging.getLogger(name)
    logger.addFilter(_make_printable)
    return logger


def _make_printable(record: logging.LogRecord) -> bool:
    """Changes the arguments of `record` and not the record's message, which is ours."""
    if isinstance(record.args, tuple):
        record.args = tuple(each if isinstance(each, int | float) else printable(str(each)) for each in record.args)
    return True
