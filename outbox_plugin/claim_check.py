"""The claim check: values that are too large for Kafka go to an object store, and their records say where they are.

The pattern is "Claim Check" of Hohpe and Woolf, "Enterprise Integration Patterns" (2003).

An object's name is the SHA-256 of the value. So storing a value twice changes nothing, a reader notices a value that is
not the one that was stored, and a record names an object of the reader's own store only, whoever has written it.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EBADF, EINVAL
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote
from uuid import uuid4

from outbox_plugin.core.headers import CLAIM_CHECK_HEADER
from outbox_plugin.emit.event import Event
from outbox_plugin.emit.row_encoder import Serializer, as_text
from outbox_plugin.errors import ClaimUnavailable, InvalidEvent, UserError
from outbox_plugin.printable import one_line
from outbox_plugin.threads.calls_with_deadline import CallsWithDeadline

__all__ = ["ClaimCheck"]

ABOVE_BYTES = 900_000  # A record has at most 1,000,000 bytes, and key and headers are among them.
TIMEOUT_SECONDS = 300.0  # A gigabyte takes as long at 30 Mbit/s.
_CLAIM = re.compile(rb"sha256:([0-9a-f]{64})")
_URL = re.compile(r"(?:file|local):///.+|(?!(?:file|local):)[\w.+:-]+://.+")
_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}  # They need no folders; asked for one, they make a bucket.

_USER = re.compile(r"://([^/\s]+)@")
_SECRET_OPTION = re.compile(r"key|secret|password|passwd|token|credential|sas|connection_string|auth", re.IGNORECASE)
_SECRET_QUERY = re.compile(
    r"(?<=[?&])([\w-]*(?:sig|token|secret|password|credential|key)[\w-]*=)[^&\s'\"]+", re.IGNORECASE
)


class Record(Protocol):
    """What an inbox's handler gets, as far as it is needed here."""

    @property
    def value(self) -> bytes | None:
        """Its content."""
        ...

    @property
    def headers(self) -> tuple[tuple[str, bytes | None], ...]:
        """Its headers, in their order."""
        ...


class ClaimCheck:
    """An object store for large values.

    Example:
        store = ClaimCheck("s3://shop-events/values")
        event = store.check_in(Event(topic="scans", key="17", value=scan))  # Before the transaction begins.
        outbox.emit(connection, event)

        def handle(connection, event):
            scan = store.value_of(event)
    """

    def __init__(
        self,
        url: str,
        *,
        above_bytes: int = ABOVE_BYTES,
        serializer: Serializer = as_text,
        storage_options: dict[str, Any] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """Name the store. Nothing is written yet.

        Args:
            url: a folder of any store that fsspec knows: `s3://bucket/folder`, `gs://…`, `abfs://…`, `file:///folder`.
            above_bytes: larger values are stored; others stay in their events.
            serializer: makes the value, as that of `Outbox`. Give one here, and none to the outbox.
            storage_options: fsspec's options for the store, such as credentials.
            timeout_seconds: how long a value may take to be stored or fetched. Libraries may wait for ever for a store
                that does not answer, whatever time-outs their options set.

        Raises:
            UserError: fsspec, or its part for such a store, is not installed, there is no such kind of store, or it
                refuses us; or an argument is wrong.
        """
        try:
            import fsspec  # noqa: F401
        except ImportError:
            raise UserError("a claim check needs the library fsspec: install outbox-plugin[claim-check]") from None
        if not isinstance(url, str) or not _URL.fullmatch(url):
            shown = _USER.sub("://***@", url) if isinstance(url, str) else url
            raise UserError(
                "the object store of the claim check: expected a URL with a folder, such as s3://bucket/folder or "
                f"file:///folder (given: {shown!r})"
            )
        if not isinstance(above_bytes, int) or above_bytes < 0:
            raise UserError(f"above_bytes: expected a number of bytes, 0 or more (given: {above_bytes!r})")
        if not isinstance(timeout_seconds, int | float) or not 0 < timeout_seconds <= threading.TIMEOUT_MAX:
            raise UserError(f"timeout_seconds: expected a number of seconds above 0 (given: {timeout_seconds!r})")
        if storage_options is not None and not isinstance(storage_options, dict):
            raise UserError(f"storage_options: expected a dict (given: one of type {type(storage_options).__name__})")
        self._url = url
        self._options = storage_options or {}
        self._secrets = _secrets(url, self._options)
        self._timeout_seconds = timeout_seconds
        try:
            self._open()
        except Exception as error:  # A store may connect at once, and then raises whatever its library raises.
            raise UserError(f"the object store of the claim check: {self._reason(error)}") from None
        self._above_bytes = above_bytes
        self._serializer = serializer

    def check_in(self, event: Event) -> Event:
        """Store the event's value, if it is large. Returns the event to emit, with a claim in place of the value.

        It takes as long as the store does, so call it before the transaction begins; in a coroutine, by
        `asyncio.to_thread`. If the transaction is rolled back, the object stays: let the store delete objects by age.

        Args:
            event: any event. A tombstone is returned unchanged, and so is an event that is small, or has a claim.

        Raises:
            InvalidEvent: the value cannot be serialized, or the event has a header `claim-check` that is no claim.
            ClaimUnavailable: the store did not take the value, or not in time.
        """
        claims = [body for header, body in event.header_items() if header == CLAIM_CHECK_HEADER]
        if claims:
            if not _digest_of(claims[-1]):
                raise InvalidEvent(f"headers.{CLAIM_CHECK_HEADER}", f"the claim check {_no_claim(claims[-1])}")
            return event
        value = self._serializer(event)
        if value is None:
            return event
        try:
            body = value.encode() if isinstance(value, str) else value
        except UnicodeEncodeError as error:
            raise InvalidEvent("value", f"not valid text: {error.reason}") from None
        if len(body) <= self._above_bytes:
            return event if self._serializer is as_text else event.model_copy(update={"value": value})
        name = sha256(body).hexdigest()
        with self._unavailable(name, "stored"):
            self._calls.result(lambda: self._put(self._path(name), body), self._timeout_seconds)
        claim = f"sha256:{name}"
        others = event.headers.items() if isinstance(event.headers, dict) else event.headers
        headers: Any = [*others, (CLAIM_CHECK_HEADER, claim)]
        if isinstance(event.headers, dict):
            headers = dict(headers)
        shown = json.dumps({"claim_check": claim, "bytes": len(body)})
        return event.model_copy(update={"value": shown, "headers": headers})

    def value_of(self, record: Record) -> bytes | None:
        """The value of a record, fetched from the store if it was stored there; None for a tombstone.

        Args:
            record: as an inbox's handler gets it.

        Raises:
            ClaimUnavailable: the store does not have the value, or has another one, or does not answer in time.
            ValueError: the record's claim is none.
        """
        claims = [value for name, value in record.headers if name == CLAIM_CHECK_HEADER]
        if not claims:
            return record.value
        name = _digest_of(claims[-1])
        if not name:
            raise ValueError(f"the header {CLAIM_CHECK_HEADER} {_no_claim(claims[-1])}")
        with self._unavailable(name, "fetched"):
            body = self._calls.result(lambda: bytes(self._store.cat_file(self._path(name))), self._timeout_seconds)
        if sha256(body).hexdigest() != name:
            raise ClaimUnavailable(f"the object store has another value as {name}; expected the one that was stored")
        return body

    def _open(self) -> None:
        """Make the store's client. Those of fsspec do not survive a fork, so a child process makes its own."""
        import fsspec

        self._store, self._folder = fsspec.url_to_fs(self._url, **self._options)
        self._calls = CallsWithDeadline("the store", "outbox-claim-check")
        self._process = os.getpid()

    def _put(self, path: str, body: bytes) -> None:
        """Store an object. It appears as a whole, or not at all, and one that is there already stays readable."""
        from fsspec.implementations.local import LocalFileSystem

        protocol = self._store.protocol
        if _BUCKETS.isdisjoint([protocol] if isinstance(protocol, str) else protocol):
            self._store.makedirs(self._store._parent(path), exist_ok=True)
        if isinstance(self._store, LocalFileSystem):  # A writer that ends early leaves a part; object stores do not.
            _write_whole(Path(path), body)
            for folder in (*Path(path).parents[:2], Path(self._folder).parent):  # All that may be new.
                _make_durable(folder)
        else:
            self._store.pipe_file(path, body)

    @contextmanager
    def _unavailable(self, name: str, done: str) -> Iterator[None]:
        """Whatever a store's library raises means that the value cannot be had for now."""
        try:
            if self._process != os.getpid():
                self._open()
            yield
        except Exception as error:
            if done == "fetched" and isinstance(error, FileNotFoundError):
                missing = f"the object store has no value {name}; was it deleted before it was read?"
                raise ClaimUnavailable(missing) from None
            # Not from the error, which may show credentials.
            raise ClaimUnavailable(f"the value {name} could not be {done}: {self._reason(error)}") from None

    def _reason(self, error: Exception) -> str:
        """What the error says in one line, without the store's credentials."""
        said = one_line(error)
        for secret in self._secrets:
            said = said.replace(secret, "***")
        return _SECRET_QUERY.sub(r"\1***", _USER.sub("://***@", said))

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name[:2]}/{name}"


def _write_whole(path: Path, body: bytes) -> None:
    """Write a file in a way that the file at `path` has all of `body`, or stays what it was."""
    part = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        with part.open("xb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _make_durable(folder: Path) -> None:
    """Have the disk keep the names in a folder. Some network file systems know no such thing."""
    try:
        file = os.open(folder, os.O_RDONLY)
    except PermissionError:  # It is not ours, so we made nothing in it.
        return
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (EBADF, EINVAL):
            raise
    finally:
        os.close(file)


def _digest_of(claim: str | bytes | None) -> str:
    """The digest that a claim names; empty if it is none."""
    found = _CLAIM.fullmatch((claim.encode() if isinstance(claim, str) else claim) or b"")
    return found[1].decode() if found else ""


def _no_claim(claim: str | bytes | None) -> str:
    return f"begins with {(claim or b'')[:80]!r}; expected sha256: and 64 hexadecimal digits"


def _secrets(url: str, options: dict[str, Any]) -> list[str]:
    """The texts that no message may show, the longest first."""
    found = {text for user in _USER.findall(url) for text in (user, unquote(user), unquote(user.partition(":")[2]))}
    found.update(_secret_options(options))
    return sorted(found - {""}, key=len, reverse=True)


def _secret_options(options: dict[str, Any]) -> Iterator[str]:
    for name, option in options.items():
        if isinstance(option, dict):
            yield from _secret_options(option)
        elif isinstance(option, str) and _SECRET_OPTION.search(str(name)):
            yield option
