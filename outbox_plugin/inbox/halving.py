"""How a batch that fails is halved until the guilty event is alone, and what became of each key batch.

Decides only, and runs nothing. Rules:

- parts are handled in the order of their records, which keeps the order of each key;
- a part that fails is replaced by its two halves; a part of one record is not divided any more;
- a record that will be tried again delays its own key: the records behind it in its key batch are not handled now;
- a key whose first record has failed before is not mixed with others, because it would roll them back again.
"""

from __future__ import annotations

from collections.abc import Callable

from outbox_plugin.inbox.key_queues import KeyBatch, Outcome
from outbox_plugin.inbox.received import Received
from outbox_plugin.inbox.retry import Failures

Item = tuple[int, Received]  # The number of its key batch, and a record. No class, because there are many.


class Halves:
    """The parts of one batch.

    Attributes:
        rolled_back: a part was rolled back.
        deadlock: a part was rolled back because of a deadlock.
    """

    def __init__(self, batches: list[KeyBatch], apart: Callable[[KeyBatch], bool]) -> None:
        """Divide the batch into its first parts.

        Args:
            batches: the batch, key by key.
            apart: returns whether each record of a key batch is a part by itself.
        """
        self.rolled_back = self.deadlock = False
        self._batches = batches
        self._done = [0] * len(batches)
        self._stopped: dict[int, Outcome] = {}
        alone = [apart(each) for each in batches]
        items = [(number, record) for number, each in enumerate(batches) for record in each.records]
        together = [each for each in items if not alone[each[0]]] if any(alone) else items
        # The next part is the last of these.
        self._parts = [[each] for each in reversed(items) if alone[each[0]]] if any(alone) else []
        self._parts += [together] if together else []
        self._part: list[Item] = []

    def next(self) -> list[Item]:
        """Return the next part; an empty list if none is left."""
        self._part = []
        while self._parts and not self._part:
            self._part = [each for each in self._parts.pop() if each[0] not in self._stopped]
        return self._part

    def as_key_batch(self, item: Item) -> KeyBatch:
        """Return a record as a key batch of its own, with the failures that it has had."""
        number, record = item
        taken = self._batches[number]
        return KeyBatch(taken.queue, [record], Failures() if self._done[number] else taken.failures)

    def done(self) -> None:
        """Note that the part has been handled."""
        for number, _ in self._part:
            self._done[number] += 1

    def failed(self, *, deadlock: bool) -> None:
        """Halve the part, which has more than one record and was rolled back."""
        self.rolled_back, self.deadlock = True, self.deadlock or deadlock
        middle = len(self._part) // 2
        self._parts += [self._part[middle:], self._part[:middle]]

    def single(self, outcome: Outcome) -> None:
        """Note what became of the part, which is one record."""
        if outcome.done:
            self.done()
        else:
            number = self._part[0][0]
            self._stopped[number] = Outcome(self._done[number], outcome.again_in, outcome.fault)

    def away(self, outcome: Callable[[int], Outcome]) -> None:
        """Give up all that is left, because the database is away.

        Args:
            outcome: returns the outcome of a key batch, given how many of its records are done.
        """
        for number, taken in enumerate(self._batches):
            if number not in self._stopped and self._done[number] < len(taken.records):
                self._stopped[number] = outcome(self._done[number])

    def outcomes(self) -> list[Outcome]:
        """Return what became of each key batch."""
        return [self._stopped.get(number, Outcome(done)) for number, done in enumerate(self._done)]
