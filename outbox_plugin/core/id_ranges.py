"""Sets of outbox ids as ranges, and their text form, which is Postgres' int8multirange."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

SMALLEST_ID, LARGEST_ID = -(2**63), 2**63 - 1  # Postgres' bigint.
_NUMBER = "(?:0|-?[1-9][0-9]{0,18})"
_RANGE = re.compile(rf"\[({_NUMBER}),({_NUMBER})\)")
_TEXT = re.compile(rf"\{{(?:\[{_NUMBER},{_NUMBER}\)(?:,\[{_NUMBER},{_NUMBER}\))*)?\}}")


@dataclass(frozen=True, slots=True)
class IdRanges:
    """Ids as ascending, disjoint, half-open ranges `(first, after_last)`."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ids: Sequence[int]) -> IdRanges:
        """The set of `ids`, which must ascend strictly."""
        if not ids:
            return cls()
        if ids[-1] - ids[0] == len(ids) - 1:  # No gaps, as nearly always.
            return cls(((ids[0], ids[-1] + 1),))
        ends = [(end, start) for end, start in pairwise(ids) if start != end + 1]
        starts = [ids[0], *(start for _, start in ends)]
        return cls(tuple(zip(starts, [*(end + 1 for end, _ in ends), ids[-1] + 1], strict=True)))

    @classmethod
    def union(cls, sets: Iterable[IdRanges]) -> IdRanges:
        """All ids that are in any of `sets`."""
        merged: list[tuple[int, int]] = []
        for first, after in sorted(each for ids in sets for each in ids.ranges):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(after, merged[-1][1]))
            else:
                merged.append((first, after))
        return cls(tuple(merged))

    @classmethod
    def parse(cls, text: str) -> IdRanges:
        """The set that `text`, a canonical int8multirange, stands for.

        Raises:
            ValueError: `text` is no such thing.
        """
        if not _TEXT.fullmatch(text):
            raise ValueError(f"not an int8multirange: {text[:80]!r}")
        ranges = tuple((int(first), int(after)) for first, after in _RANGE.findall(text))
        bounds = [bound for each in ranges for bound in each]
        ascend = all(bound < following for bound, following in pairwise(bounds))
        if bounds and not (ascend and bounds[0] >= SMALLEST_ID and bounds[-1] <= LARGEST_ID):
            raise ValueError(f"not an int8multirange in its canonical form: {text[:80]!r}")
        return cls(ranges)

    def above(self, id_: int) -> IdRanges:
        """The ids that are greater than `id_`."""
        if not self.ranges or self.ranges[0][0] > id_:
            return self
        return IdRanges(tuple((max(first, id_ + 1), after) for first, after in self.ranges if after > id_ + 1))

    def text(self) -> str:
        """The set as Postgres writes an int8multirange: `{[1,5),[7,8)}`."""
        return "{" + ",".join(f"[{first},{after})" for first, after in self.ranges) + "}"

    def __iter__(self) -> Iterator[int]:
        for first, after in self.ranges:
            yield from range(first, after)

    def __len__(self) -> int:
        return sum(after - first for first, after in self.ranges)

    def __contains__(self, wanted: object) -> bool:
        return isinstance(wanted, int) and any(first <= wanted < after for first, after in self.ranges)
