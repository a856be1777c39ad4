"""Halving: how a batch that fails is divided until the guilty event is alone, and what became of each slice.

All that decides is here; it runs nothing. Rules:

- parts are handled in the order of their records, so a lane's records are handled in their order;
- a part that fails is replaced by its two halves; one of a single record is not divided any more;
- a record that is to be tried again holds up its own lane: what is behind it in its slice is not handled now;
- a lane whose first record has failed before is not mixed with others: it would have them undone again.
"""

from __future__ import annotations

from collections.abc import Callable

from outbox_plugin.inbox.lanes import Outcome, Slice
from outbox_plugin.inbox.received import Received

Item = tuple[int, Received]  # The number of its slice, and a record. No class: there are many.


class Halves:
    """The parts of one batch. `undone`: a part had to be undone; `deadlock`: one was because of a deadlock."""

    def __init__(self, slices: list[Slice], apart: Callable[[Slice], bool]) -> None:
        """`apart` says of which slices each record is a part by itself."""
        self.undone = self.deadlock = False
        self._slices = slices
        self._done = [0] * len(slices)
        self._stopped: dict[int, Outcome] = {}
        alone = [apart(each) for each in slices]
        items = [(number, record) for number, each in enumerate(slices) for record in each.records]
        together = [each for each in items if not alone[each[0]]] if any(alone) else items
        # The next part is the last of these.
        self._parts = [[each] for each in reversed(items) if alone[each[0]]] if any(alone) else []
        self._parts += [together] if together else []
        self._part: list[Item] = []

    def next(self) -> list[Item]:
        """The next part, which is not empty; an empty list when all are through."""
        self._part = []
        while self._parts and not self._part:
            self._part = [each for each in self._parts.pop() if each[0] not in self._stopped]
        return self._part

    def as_slice(self, item: Item) -> Slice:
        """A record as a slice of its own, with the failures that it has had."""
        number, record = item
        taken = self._slices[number]
        first = self._done[number] == 0
        return Slice(taken.lane, [record], taken.failures * first, taken.losses * first)

    def done(self) -> None:
        """The part has been handled."""
        for number, _ in self._part:
            self._done[number] += 1

    def failed(self, *, deadlock: bool) -> None:
        """The part, of more than one record, was undone."""
        self.undone, self.deadlock = True, self.deadlock or deadlock
        middle = len(self._part) // 2
        self._parts += [self._part[middle:], self._part[:middle]]

    def single(self, outcome: Outcome) -> None:
        """What became of the part, which is one record."""
        if outcome.done:
            self.done()
        else:
            number = self._part[0][0]
            self._stopped[number] = Outcome(self._done[number], outcome.again_in, outcome.counted, outcome.lost)

    def away(self, outcome: Callable[[int], Outcome]) -> None:
        """Nothing can be handled now. `outcome` says when a slice of which so many records are done is tried again."""
        for number, taken in enumerate(self._slices):
            if number not in self._stopped and self._done[number] < len(taken.records):
                self._stopped[number] = outcome(self._done[number])

    def outcomes(self) -> list[Outcome]:
        """What became of each slice."""
        return [self._stopped.get(number, Outcome(done)) for number, done in enumerate(self._done)]
