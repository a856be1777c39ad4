"""How the processes of this package write their log: one event on one line, as text or as JSON.

The package logs through Python's `logging`. As a library, it configures nothing. `configure` is for its own processes:
the command line, and the harvester that Dagster's daemon runs.

A line never contains a control character: text shows it as an escape (see `printable`), JSON as its own escape. If the
log cannot be written, as on a full disk, lines are lost, and the process goes on.
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
EXTRAS = ("schema", "shard", "leader", "term", "topic", "key")  # The fields of `extra` that are logged, in this order.

ROTATE_AGAIN_SECONDS = 60.0  # How long to wait after a log file could not be renamed.


class TextFormatter(logging.Formatter):
    """Local time, level and message on one line; a traceback follows on the same line, its line ends as escapes."""

    def __init__(self) -> None:
        super().__init__(LINE)

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a line feed."""
        try:
            return printable(super().format(record))
        except Exception as error:  # A library passed arguments that do not fit its message.
            record.msg, record.args, record.exc_info = _unformatted(record, error), (), None
            return printable(super().format(record))


class JsonFormatter(logging.Formatter):
    """A JSON object in ASCII on one line: timestamp (RFC 3339, UTC), level, logger, message, and the event's fields.

    The fields are `schema`, `shard`, `leader`, `term`, `topic` and `key`, if the event has them. `exception` holds the
    whole traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a line feed."""
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
        """Drop the line: whoever read standard error has gone, or the disk is full."""


class _LogFile(RotatingFileHandler):
    """A file of bounded size, with one older file beside it; standard output and standard error go to it, too.

    When a new file is begun, both streams are redirected to it. Otherwise they would write to the older file, whose
    space would stay in use after the file is removed.
    """

    _rotate_after = 0.0  # No new file before this time of the monotonic clock.

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802 - logging's name.
        """Whether to begin a new file before this line. After a failure to do so, False for a minute."""
        return time.monotonic() >= self._rotate_after and bool(super().shouldRollover(record))

    def doRollover(self) -> None:  # noqa: N802 - logging's name.
        """Begin a new file. If that fails, as in a read-only directory, go on in the present file.

        Raises:
            OSError: the present file cannot be opened again either.
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
        """Drop the line: the disk is full. If the full disk also closed the file, the next line opens it again."""
        if self.stream is not None and self.stream.closed:
            self.stream = None


def to_stderr() -> logging.Handler:
    """A handler that writes the log to standard error."""
    return _Stderr(sys.stderr)


def to_file(path: Path, most_bytes: int) -> logging.Handler:
    """A handler that writes the log to `path`. It redirects standard output and standard error there, too.

    When a line would make the file larger than `most_bytes`, the file is renamed to `path` with the suffix `.1`, which
    replaces an older file of that name, and a new file is begun. If that fails, the file grows, and the next attempt is
    made after a minute. No other process may write to the file.
    """
    return _LogFile(path, maxBytes=most_bytes, backupCount=1, encoding="utf-8", errors="backslashreplace", delay=True)


def configure(settings: LogSettings, handler: logging.Handler, default: LogLevel) -> None:
    """Make this process write its log through `handler`, unless logging has been configured already.

    In JSON format, Python's warnings and uncaught exceptions become events of the log, too.

    Args:
        settings: the format and the level.
        handler: writes the log.
        default: the level, if the settings name none.
    """
    as_json = settings.log_format == "json"
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logging.basicConfig(level=settings.log_level or default, handlers=[handler])
    logging.getLogger("py4j").setLevel(logging.INFO)  # At DEBUG, it logs every call to the JVM, with passwords.
    if as_json:
        logging.captureWarnings(capture=True)
        sys.excepthook = lambda *uncaught: logger.critical("ends by an unexpected error", exc_info=uncaught)
        threading.excepthook = _log_uncaught


def _log_uncaught(ended: threading.ExceptHookArgs) -> None:
    """Log the exception that ended a thread, but for SystemExit, which Python's own hook ignores, too."""
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
    """`value`, with lone surrogates shown as escapes, because not every JSON parser accepts lone surrogates."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
