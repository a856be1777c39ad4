"""A set of sequence numbers that takes little memory if they lie close together. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

_WIDTH = 256  # Numbers whose bits are kept as one integer.


class SequenceSet:
    """A set of numbers from 1 on. A number with neighbors takes half a byte, an isolated one some 150 bytes."""

    def __init__(self) -> None:
        """Make an empty set."""
        self._bits: dict[int, int] = {}
        self.last = 0  # The largest number.

    def add(self, number: int) -> None:
        """Add `number`; a number below 1 is ignored."""
        if number < 1:
            return
        block, bit = divmod(number, _WIDTH)
        self._bits[block] = self._bits.get(block, 0) | 1 << bit
        self.last = max(self.last, number)

    def __len__(self) -> int:
        return sum(bits.bit_count() for bits in self._bits.values())

    def missing(self, last: int) -> Iterator[int]:
        """Yields the numbers from 1 to `last` that are not in the set, in ascending order."""
        number = 1
        while number <= last:
            block, bit = divmod(number, _WIDTH)
            bits = self._bits.get(block, 0)
            if bits.bit_count() == _WIDTH:
                number += _WIDTH - bit
                continue
            if not bits >> bit & 1:
                yield number
            number += 1
