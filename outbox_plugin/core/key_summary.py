"""A set of ordering keys that a backlog may have rows of, in a few bytes for each row.

It is a blocked Bloom filter (Putze, Sanders and Singler, 2007) whose blocks are single bytes: a key's hash names a
byte, and three of its bits. If one of a key's bits is not set, the backlog has no row of the key. If all are set, it
may have one, or the bits were set for other keys. Three bits of one byte cost no more to set than one bit.
"""

from __future__ import annotations

import sys
from array import array
from itertools import combinations, cycle, islice

HASH_BITS, HASH_BYTES = 63, 8  # The database computes hashes of so many bits, so they are not negative.
_BYTES_PER_ROW = 8  # With so many, one answer in 200 is wrong, at most: if every row has a key of its own.
_MIN_BYTES, _MAX_BYTES = 2**13, 2**26  # 8 kB and 64 MB.
# The upper end of a hash gives the bits, and its lower end the byte. So the two are independent.
_PATTERN_BITS = 8
_PATTERN_SHIFT = HASH_BITS - _PATTERN_BITS
_PATTERNS = bytes(islice(cycle(sum(1 << bit for bit in bits) for bits in combinations(range(8), 3)), 2**_PATTERN_BITS))


class KeySummary:
    """A set of hashed ordering keys. It may seem to hold a key that was never added; it never lacks one that was."""

    def __init__(self, rows: int) -> None:
        """Hold no key.

        Args:
            rows: how many rows are expected, at most. It decides the size. If more rows are added, more answers are
                wrong.
        """
        size = min(_MAX_BYTES, max(_MIN_BYTES, 1 << (_BYTES_PER_ROW * rows).bit_length()))
        self._blocks = bytearray(size)
        self._mask = size - 1

    def add(self, hashes: bytes) -> None:
        """Add keys.

        Args:
            hashes: one of `HASH_BYTES` for each key, big-endian, joined.
        """
        numbers = array("Q", hashes)
        if sys.byteorder == "little":
            numbers.byteswap()
        blocks, mask, patterns = self._blocks, self._mask, _PATTERNS
        for number in numbers:
            blocks[number & mask] |= patterns[number >> _PATTERN_SHIFT]

    def may_hold(self, key_hash: int) -> bool:
        """Whether a key with this hash may have been added."""
        pattern = _PATTERNS[key_hash >> _PATTERN_SHIFT]
        return self._blocks[key_hash & self._mask] & pattern == pattern
