"""The serializers for `Outbox(serializer=…)`."""

from __future__ import annotations

from outbox_plugin.emit.row_encoder import as_bytes, as_text
from outbox_plugin.emit.schema_registry import registered, registered_key

__all__ = ["as_bytes", "as_text", "registered", "registered_key"]
