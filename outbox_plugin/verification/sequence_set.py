"""Which places of a job have been seen: a set of numbers that is small where they lie close together. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

_WIDTH = 256  # Numbers whose bits are kept as one integer.


class SequenceSet:
    """A set of numbers of 1 and above. Close together, one takes half a byte; on its own, some 150 bytes."""

    def __init__(self) -> None:
        """No number is in it."""
        self._bits: dict[int, int] = {}
        self.last = 0  # The largest one.

    def add(self, number: int) -> None:
        """Put `number` in; below 1, it is no place."""
        if number < 1:
            return
        block, bit = divmod(number, _WIDTH)
        self._bits[block] = self._bits.get(block, 0) | 1 << bit
        self.last = max(self.last, number)

    def __len__(self) -> int:
        return sum(bits.bit_count() for bits in self._bits.values())

    def missing(self, last: int) -> Iterator[int]:
        """The numbers from 1 to `last` that are not in it, ascending; made one by one, as there may be very many."""
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
