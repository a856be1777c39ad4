"""How the processes of this package write their log: one event on one line, as text or as JSON.

The package logs through Python's `logging` and sets nothing up where it is a library. `configure` is for the processes
that are its own: the command line, and the harvester that Dagster's daemon runs.

A line never holds a control character: in text they are shown as escapes (see `printable`), in JSON they are JSON's
own. A log that cannot be written, as on a full disk, loses lines; it never ends what the process is there for.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from outbox_plugin.printable import logger_of, printable
from outbox_plugin.settings import LogLevel, LogSettings

logger = logger_of("outbox_plugin.process")

LINE = "%(asctime)s %(levelname)s %(message)s"
EXTRAS = ("shard", "leader", "term", "topic", "key")  # What an event may name in `extra`, in the order of its line.

ROTATE_AGAIN_SECONDS = 60.0  # After a log file could not be renamed.


class TextFormatter(logging.Formatter):
    """Local time, level and message on one line; a traceback follows on the same line, its line ends as escapes."""

    def __init__(self) -> None:
        super().__init__(LINE)

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        try:
            return printable(super().format(record))
        except Exception as error:  # Arguments that do not fit, of a library.
            record.msg, record.args, record.exc_info = _unformatted(record, error), (), None
            return printable(super().format(record))


class JsonFormatter(logging.Formatter):
    """A JSON object of ASCII on one line: timestamp (RFC 3339, UTC), level, logger, message, and what the event names.

    `shard`, `leader`, `term`, `topic` and `key` are there where the event has them, as they are. `exception` holds a
    whole traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, str | int] = {
            "timestamp": moment.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
        }
        try:
            fields["message"] = record.getMessage()
        except Exception as error:
            fields["message"] = _unformatted(record, error)
        for name in EXTRAS:
            value = getattr(record, name, None)
            if value is not None:
                fields[name] = value if isinstance(value, int) else _text(value)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: _without_surrogates(value) for name, value in fields.items()})


class _Stderr(logging.StreamHandler[TextIO]):
    """Standard error."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name.
        """Lose the line: its reader has gone, or the disk is full."""


class _LogFile(RotatingFileHandler):
    """A file of bounded size, with one older file beside it; standard output and standard error go to it, too.

    So they must follow when a new file is begun: else what is written to them would go to the older one, and keep its
    space after it has been removed.
    """

    _rotate_after = 0.0  # On the monotonic clock.

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802 - logging's name.
        """Whether the line begins a new file. Not for a minute after that has failed."""
        return time.monotonic() >= self._rotate_after and bool(super().shouldRollover(record))

    def doRollover(self) -> None:  # noqa: N802 - logging's name.
        """Begin a new file; where that fails, as in a directory that is read-only, go on in the present one.

        Raises:
            OSError: the present one cannot be opened again either.
        """
        try:
            super().doRollover()
        except OSError:
            self._rotate_after = time.monotonic() + ROTATE_AGAIN_SECONDS
            if self.stream is None or self.stream.closed:
                self.stream = self._open()

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        for descriptor in (sys.__stdout__, sys.__stderr__):
            if descriptor is not None:
                os.dup2(stream.fileno(), descriptor.fileno())
        return stream

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - logging's names.
        """Lose the line: the disk is full. A file that could not be closed for it is opened again for the next line."""
        if self.stream is not None and self.stream.closed:
            self.stream = None


def to_stderr() -> logging.Handler:
    """What writes the log to standard error."""
    return _Stderr(sys.stderr)


def to_file(path: Path, most_bytes: int) -> logging.Handler:
    """What writes the log, standard output and standard error to `path`.

    When a line would make the file larger than `most_bytes`, the file is renamed to `path` with `.1` behind it, in the
    place of an older one, and a new file is begun. Where that fails, the file grows, and it is tried again after a
    minute. No other process may write to it.
    """
    return _LogFile(path, maxBytes=most_bytes, backupCount=1, encoding="utf-8", errors="backslashreplace", delay=True)


def configure(settings: LogSettings, handler: logging.Handler, default: LogLevel) -> None:
    """Have this process write its log through `handler`, unless a log has been set up already.

    In the JSON format, Python's warnings and errors that nobody catches become events of the log, too.

    Args:
        settings: the format and the level.
        handler: where the log goes.
        default: the level, where the settings name none.
    """
    as_json = settings.log_format == "json"
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logging.basicConfig(level=settings.log_level or default, handlers=[handler])
    logging.getLogger("py4j").setLevel(logging.INFO)  # At DEBUG, it logs passwords among all that Spark is told.
    if as_json:
        logging.captureWarnings(capture=True)
        sys.excepthook = lambda *uncaught: logger.critical("ends by an unexpected error", exc_info=uncaught)
        threading.excepthook = _log_uncaught


def _log_uncaught(ended: threading.ExceptHookArgs) -> None:
    """Log what ends a thread. Python's own hook ignores SystemExit, by which a thread ends itself; so does this one."""
    if issubclass(ended.exc_type, SystemExit):
        return
    logger.critical(
        "a thread ends by an unexpected error",
        exc_info=(ended.exc_type, ended.exc_value or ended.exc_type(), ended.exc_traceback),
    )


def is_json() -> bool:
    """Whether this process writes its log as JSON."""
    return any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers)


def _unformatted(record: logging.LogRecord, error: Exception) -> str:
    return f"a message of {record.pathname}:{record.lineno} cannot be shown: {type(error).__name__}"


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    try:
        return str(value)
    except Exception as error:
        return f"cannot be shown: {type(error).__name__}"


def _without_surrogates(value: str | int) -> str | int:
    """`value`, in which a surrogate on its own is shown as an escape: JSON's form of one is not accepted everywhere."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
