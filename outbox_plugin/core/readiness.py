"""Whether a part of a process does what it should, and why: `harvester_readiness` and others like it decide that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ready:
    """It does what it should; `reason` says what, in one line for an operator."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotReady:
    """It does not; `reason` says why, in one line for an operator."""

    reason: str


Readiness = Ready | NotReady
