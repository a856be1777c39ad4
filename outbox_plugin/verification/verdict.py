"""The result of verifying topics. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_EXAMPLES = 3


@dataclass(slots=True)
class TopicVerdict:
    """The result of a verification.

    Attributes:
        records: how many records were verified.
        duplicates: how many records repeat the event of an earlier record.
        order_violations: how many records follow a later event of their key.
        example_duplicates: the first duplicates, each with its location.
        example_violations: the first records out of order, each with its location.
        replayed: how many records `outbox replay` has emitted again. They repeat events on purpose, so neither their
            number nor their order is checked.
        unnamed: how many records lack the headers that identify their event, so that duplicates cannot be found.
        unplaced: how many records lack the header that numbers their event, so that their order cannot be checked.
        missing: how many events were emitted and are not in the topics.
        example_missing: the first missing events, each by its job and its sequence number, or by its idempotency key.
    """

    records: int = 0
    duplicates: int = 0
    order_violations: int = 0
    example_duplicates: list[str] = field(default_factory=list)
    example_violations: list[str] = field(default_factory=list)
    replayed: int = 0
    unnamed: int = 0
    unplaced: int = 0
    missing: int = 0
    example_missing: list[str] = field(default_factory=list)

    @property
    def in_order(self) -> bool:
        """Whether each event, as far as that can be checked, came once and in order."""
        return not (self.duplicates or self.order_violations)

    @property
    def complete(self) -> bool:
        """Whether the events came once and in order, and none is missing."""
        return self.in_order and not self.missing
