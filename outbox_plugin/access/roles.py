"""The roles in which programs and people use an outbox. No I/O."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a program or a person does with an outbox; the value is the role's name on the command line."""

    EMITTER = "emitter"
    HARVESTER = "harvester"
    INBOX = "inbox"
    SPARK = "spark"
    OPERATOR = "operator"
    MONITOR = "monitor"
