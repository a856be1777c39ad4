"""Decides whether an instance is too slow for its partitions, and which one it leaves to a faster instance. No I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from itertools import pairwise

from outbox_plugin.coordination.partition_owners import Holder
from outbox_plugin.core.topic_partition import TopicPartition

SAMPLES = 10  # The lag must grow over this many samples.
MUCH_FASTER = 4  # A partition is left only to an instance whose lag is smaller by this factor.


class LagTrend:
    """An instance's lag over all its partitions, sampled with each heartbeat."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._samples: deque[tuple[int, int]] = deque(maxlen=SAMPLES)

    def add(self, lag: int, handled: int) -> None:
        """Add a sample. `lag`: in records; `handled`: how many records were ever handed out."""
        self._samples.append((lag, handled))

    def forget(self) -> None:
        """Start over: the partitions that are held have changed."""
        self._samples.clear()

    @property
    def falls_behind(self) -> bool:
        """Whether the lag was never 0, never shrank, has grown, and exceeds what was handled meanwhile."""
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
    """The partition that `me` leaves if another instance is much faster: the one with the largest lag.

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
