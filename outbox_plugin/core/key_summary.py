"""Which ordering keys a backlog may have rows of, in a few bytes for each row.

It is a blocked Bloom filter (Putze, Sanders and Singler, 2007) whose blocks are single bytes: a key's hash names a
byte, and three of its bits. A key of which one bit is not set has no row in the backlog. A key whose bits are set may
have one, or shares them with keys that have. To set three bits costs no more than to set one: it is the same byte.
"""

from __future__ import annotations

import sys
from array import array
from itertools import combinations, cycle, islice

HASH_BITS, HASH_BYTES = 63, 8  # Of the hashes that the database computes, which are not negative.
_BYTES_PER_ROW = 8  # At most one answer in 200 is wrong, if every row has a key of its own.
_LEAST_BYTES, _MOST_BYTES = 2**13, 2**26  # 8 kB and 64 MB.
# The bits follow from a hash's upper end, and the byte from its lower end: so the one says nothing of the other.
_PATTERN_BITS = 8
_PATTERN_SHIFT = HASH_BITS - _PATTERN_BITS
_PATTERNS = bytes(islice(cycle(sum(1 << bit for bit in bits) for bits in combinations(range(8), 3)), 2**_PATTERN_BITS))


class KeySummary:
    """A set of hashed ordering keys. It may seem to hold a key that was never added; it never lacks one that was."""

    def __init__(self, rows: int) -> None:
        """Hold no key.

        Args:
            rows: how many rows are expected at most; the size follows from it. More rows than that are added just as
                well, and make more answers wrong.
        """
        size = min(_MOST_BYTES, max(_LEAST_BYTES, 1 << (_BYTES_PER_ROW * rows).bit_length()))
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
