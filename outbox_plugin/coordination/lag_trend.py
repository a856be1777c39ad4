"""Whether an instance is too slow for what it holds, and what it leaves to a faster one: plain decisions, no I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from itertools import pairwise

from outbox_plugin.coordination.world import Holder
from outbox_plugin.core.topic_partition import TopicPartition

SAMPLES = 10  # Over so many samples the lag has to grow.
MUCH_FASTER = 4  # Only to one whose lag is smaller by this factor is a partition left.


class LagTrend:
    """The lag of all that an instance holds, as it was sampled with one heartbeat after the other."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._samples: deque[tuple[int, int]] = deque(maxlen=SAMPLES)

    def add(self, lag: int, handled: int) -> None:
        """The lag is `lag` now; `handled` counts all records that were ever handed out."""
        self._samples.append((lag, handled))

    def forget(self) -> None:
        """Begin anew, as what is held has changed."""
        self._samples.clear()

    @property
    def falls_behind(self) -> bool:
        """Whether the lag was never gone, never shrank, grew, and is more than was handled meanwhile."""
        if len(self._samples) < SAMPLES:
            return False
        lags = [lag for lag, _ in self._samples]
        handled = self._samples[-1][1] - self._samples[0][1]
        grows = all(later >= earlier for earlier, later in pairwise(lags))
        return lags[0] > 0 and grows and lags[-1] > max(lags[0], handled)


def left_to_others(
    me: Holder,
    lags: Mapping[TopicPartition, int],
    holders: Mapping[TopicPartition, Holder | None],
    members: Mapping[Holder, bool],
) -> TopicPartition | None:
    """Which partition `me`, who falls behind, should leave: its most lagging one, where another is much faster.

    Args:
        me: this instance.
        lags: how many records each partition still has for its holder.
        holders: who holds each partition.
        members: the live instances.
    """
    total = Counter(dict.fromkeys(members, 0))
    for tp, holder in holders.items():
        if holder is not None:
            total[holder] += lags.get(tp, 0)
    mine = [tp for tp, holder in holders.items() if holder == me]
    if len(mine) < 2 or not any(total[other] * MUCH_FASTER < total[me] for other in members if other != me):
        return None
    return max(mine, key=lambda tp: (lags.get(tp, 0), tp))
