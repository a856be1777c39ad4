"""The roles that programs and people have towards an outbox. No I/O."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Who uses the outbox; the value is what a user writes."""

    EMITTER = "emitter"
    HARVESTER = "harvester"
    INBOX = "inbox"
    SPARK = "spark"
    OPERATOR = "operator"
    MONITOR = "monitor"
