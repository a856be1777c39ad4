"""Which ordering keys are parked, as one term knows it: those that it parked, and those that the database names.

The database is asked now and then, on one thread, while another parks keys. So an answer may be older than a parking:
it does not release that key.
"""

from __future__ import annotations

from collections.abc import Iterable

from outbox_plugin.core.ordering_key import OrderingKey


class ParkedKeys:
    """The parked keys of one term."""

    def __init__(self) -> None:
        self._numbers: dict[OrderingKey, int] = {}  # The number of each key's parking.
        self._parkings = 0

    @property
    def keys(self) -> frozenset[OrderingKey]:
        """The keys that are parked."""
        return frozenset(self._numbers)

    @property
    def parkings(self) -> int:
        """How many keys were ever parked. Note it before the database is asked, and pass it to `update`."""
        return self._parkings

    def park(self, keys: Iterable[OrderingKey]) -> None:
        """Take in that the database has parked the keys."""
        for key in keys:
            self._numbers[key] = self._parkings
            self._parkings += 1

    def update(self, parked: frozenset[OrderingKey], parkings: int) -> bool:
        """Take in which keys the database says are parked.

        A key that this term has parked since the database was asked stays parked.

        Args:
            parked: the database's answer.
            parkings: the value of `parkings` before the database was asked.

        Returns:
            Whether a key was released. Its rows lie below the id watermark: read from the beginning then.
        """
        released = [key for key, number in self._numbers.items() if number < parkings and key not in parked]
        for key in released:
            del self._numbers[key]
        self.park(parked - self._numbers.keys())
        return bool(released)
