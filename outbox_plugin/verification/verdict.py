"""What a topic proves about its events. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

EXAMPLES = 3


@dataclass(slots=True)
class TopicVerdict:
    """What has been seen so far. `example_…` name the first few offenders.

    `unnamed` records could not be told from a duplicate, and of `unplaced` ones the order could not be judged: they
    lack the header that says it. `missing` events are known to have been emitted, and are not there.
    """

    records: int = 0
    duplicates: int = 0
    order_violations: int = 0
    example_duplicates: list[str] = field(default_factory=list)
    example_violations: list[str] = field(default_factory=list)
    unnamed: int = 0
    unplaced: int = 0
    missing: int = 0
    example_missing: list[str] = field(default_factory=list)

    @property
    def in_order(self) -> bool:
        """Whether every event that can be judged came once and in order."""
        return not (self.duplicates or self.order_violations)

    @property
    def complete(self) -> bool:
        """Whether, beyond that, none is missing."""
        return self.in_order and not self.missing
