"""What the record of an emitted row is, without a server."""

from __future__ import annotations

from typing import Any

from outbox_plugin.emit.row_encoder import Row
from outbox_plugin.inbox.received import Headers


def value_and_headers(row: Row) -> tuple[bytes | None, Headers]:
    """The value and the headers of the record that a harvester makes of `row`."""
    columns: Any = row
    _, _, value, names, texts, *whole = columns
    if whole:
        _, value_bytes, texts, *_ = whole
        value, names = value if value_bytes is None else value_bytes, names[1:]
    return _bytes(value), tuple((name, _bytes(text)) for name, text in zip(names, texts, strict=True))


def _bytes(body: str | bytes | None) -> bytes | None:
    return body.encode() if isinstance(body, str) else body
