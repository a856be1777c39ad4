# ruff: noqa: A002 - the names of the statements' values.
"""The Postgres of `inboxes`: what is handled, dead letters, positions, and the transactions of handlers.

The product's own `Handling` works on a `Session`. Its statements come by their names (`in_simulated_time` sees to
that), and each method here does what the statement of its name says in `outbox_plugin/schema/queries/inbox.sql`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import psycopg

from outbox_plugin.core.leader_epochs import GroupPosition, HandledPosition
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox import positions
from outbox_plugin.inbox.positions import PartitionPositions
from outbox_plugin.inbox.received import Received
from tests.simulation.inbox_plan import Chance

Row = tuple[Any, ...]
Claim = str | int  # An idempotency key, or the number of a dead letter.


class Handled(NamedTuple):
    """When a record was handled or given up, and which one."""

    at: float
    name: str


class PositionRow(NamedTuple):
    """A row of `outbox_inbox_position`.

    It is late if an inbox wrote it that had lost the partition. The owner does not know it then, and writes its own.
    """

    topic_id: str
    next_offset: int
    known: list[HandledPosition]
    is_late: bool


@dataclass(frozen=True)
class Letter:
    """A dead letter: the columns of its record, and whether an operator wants it tried again."""

    name: str
    columns: Mapping[str, Any]
    retry: bool = False


class Postgres:
    """What is committed, and the claims of transactions that are not."""

    def __init__(self) -> None:
        self.handled: dict[str, Handled] = {}  # By idempotency key.
        self.effects: Counter[str] = Counter()
        self.letters: dict[int, Letter] = {}
        self.gave_up: set[str] = set()  # The records that have ever been dead letters.
        self.mended: set[str] = set()  # The bad records that do not fail any more.
        self.rows: dict[TopicPartition, PositionRow] = {}
        self.claims: dict[Claim, Session] = {}
        self.outcomes: dict[str, str] = {}  # Of transactions, by their ids.
        self._number = 0

    def new_number(self) -> int:
        """Return a number for a transaction or a dead letter."""
        self._number += 1
        return self._number

    def covers(self, tp: TopicPartition, offset: int, topic_id: str, epoch: int) -> bool:
        """Whether a position that was written, and that counts, lies above a record."""
        row = self.rows.get(tp)
        if row is None or row.topic_id != topic_id or row.is_late:
            return False
        return any(offset < each[0] and epoch <= each[1] for each in row.known)

    def is_done(self, name: str) -> bool:
        """Whether a record has had its effect, or is or was a dead letter."""
        return self.effects[name] > 0 or name in self.gave_up

    def is_bad(self, name: str) -> bool:
        """Whether a record's handler fails as long as nobody does anything about it."""
        return " bad" in name and name not in self.mended

    def add_letter(self, letter: Letter) -> None:
        self.letters[self.new_number()] = letter
        self.gave_up.add(letter.name)

    def ask_retry(self, number: int) -> None:
        """Have a dead letter tried again."""
        self.letters[number] = replace(self.letters[number], retry=True)

    def letters_to_retry(self, chance: Chance) -> Any:
        """A connection for `to_retry`."""

        def execute(query: str, values: Mapping[str, Any]) -> Any:
            assert query == "letters_to_retry"
            chance.may_fail(psycopg.OperationalError("away"))
            partitions = {*zip(values["topics"], values["partitions"], strict=True)}
            found = [
                (number, *(each.columns[name] for name in _COLUMNS))
                for number, each in sorted(self.letters.items())
                if each.retry and (each.columns["topic"], each.columns["partition"]) in partitions
            ]
            return SimpleNamespace(fetchall=lambda: found)

        return SimpleNamespace(execute=execute)


_COLUMNS = (
    *("topic", "partition", "offset", "timestamp", "key", "value"),
    *("header_keys", "header_values", "idempotency_key"),
)


class _Suspended:
    """Leaves the next step to somebody else."""

    def __await__(self) -> Generator[None]:
        yield


class _Transaction:
    """What a session has done since it began, and not committed."""

    def __init__(self, session: Session, number: int) -> None:
        self._session = session
        self.id = str(number)
        self.handled: dict[str, str] = {}  # The names of records, by idempotency key.
        self.effects: list[Received] = []
        self.letters: dict[int, Letter | None] = {}  # Those that are changed; None: it is removed.
        self.new_letters: list[Letter] = []
        self.has_waited = False

    async def __aenter__(self) -> None:
        await self._session.connect()
        self._session.transaction_now = self

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._session.end(self, commits=error is None)


class Session:
    """A connection of a worker, and the handler that it runs: `HandlerSession`."""

    may_have_savepoints = False

    def __init__(self, chance: Chance, postgres: Postgres, judge: Callable[[Received], None]) -> None:
        """`judge` is called with each record whose effect is committed."""
        self._chance = chance
        self._postgres = postgres
        self._judge = judge
        self.lost = False
        self.transaction_now: _Transaction | None = None
        self.wanted: Collection[Claim] = ()  # What another transaction has claimed.

    @property
    def waits(self) -> bool:
        """Whether another transaction has claimed what this one wants."""
        return any(self._postgres.claims.get(each, self) is not self for each in self.wanted)

    async def connect(self) -> None:
        self._chance.may_fail(psycopg.OperationalError("away"))
        self.lost = False

    def transaction(self) -> _Transaction:
        return _Transaction(self, self._postgres.new_number())

    async def rest(self, seconds: float) -> None: ...

    def distrust(self) -> None: ...

    async def close(self) -> None: ...

    def new_sign(self) -> str:
        return ""

    def shows(self, sign: str) -> bool:
        return not self.lost

    def end(self, transaction: _Transaction, *, commits: bool) -> None:
        """Commit or roll back. The connection may be lost meanwhile: then nobody here knows which it was."""
        self.transaction_now, self.wanted = None, ()
        is_lost = commits and self._chance.fails()
        commits = commits and not (is_lost and self._chance.dice.random() < 0.5)
        self._postgres.outcomes[transaction.id] = "committed" if commits else "aborted"
        for claim in [claim for claim, session in self._postgres.claims.items() if session is self]:
            del self._postgres.claims[claim]
        if commits:
            self._commit(transaction)
        if is_lost:
            self.lost = True
            raise psycopg.OperationalError("lost at the commit")

    def _commit(self, transaction: _Transaction) -> None:
        postgres = self._postgres
        for key, name in transaction.handled.items():
            postgres.handled[key] = Handled(self._chance.now, name)
        for number, letter in transaction.letters.items():
            if letter is None:
                del postgres.letters[number]
            else:
                postgres.letters[number] = letter
        for letter in transaction.new_letters:
            postgres.add_letter(letter)
            self._chance.say(f"gives up {letter.name}")
        for record in transaction.effects:
            self._judge(record)

    async def handle(self, events: Received | list[Received]) -> None:
        """Run the handler. Once in each transaction, it takes its time."""
        assert self.transaction_now is not None
        if not self.transaction_now.has_waited:
            self.transaction_now.has_waited = True
            await _Suspended()
        for record in events if isinstance(events, list) else [events]:
            assert record.value is not None
            if self._chance.fails():
                self.lost = self._chance.dice.random() < 0.3
                raise psycopg.OperationalError("lost") if self.lost else RuntimeError("it failed")
            if self._postgres.is_bad(record.value.decode()):
                raise RuntimeError("it is bad")
            self.transaction_now.effects.append(record)
            if record.dead_letter is None:
                self.transaction_now.handled[record.idempotency_key] = record.value.decode()

    async def fetch(self, query: Any, values: dict[str, Any] | None = None) -> list[Row]:
        """Run the statement of this name."""
        rows: list[Row] = await getattr(self, f"_{query}")(**(values or {}))
        return rows

    async def _claim(self, claims: Collection[Claim]) -> _Transaction:
        self.wanted = claims
        while self.waits:
            await _Suspended()
        assert self.transaction_now is not None
        self._postgres.claims.update(dict.fromkeys(claims, self))
        self.wanted = ()
        return self.transaction_now

    async def _record_handled(self, keys: str, **_: Any) -> list[Row]:
        found = keys[2:-2].split('","')
        transaction = await self._claim(found)
        fresh = [key for key in found if key not in self._postgres.handled]
        transaction.handled.update(dict.fromkeys(fresh, ""))
        return [(len(fresh), fresh, transaction.id)]

    async def _known_formerly(self, **_: Any) -> list[Row]:
        return []

    async def _became(self, id: str) -> list[Row]:
        return [(self._postgres.outcomes[id], False)]

    async def _roll_back_prepared(self, **_: Any) -> list[Row]:
        return []

    async def _forget_handled(self, keys: list[str], **_: Any) -> list[Row]:
        for key in keys:
            self._postgres.handled.pop(key, None)
        return []

    async def _lock_letter(self, id: int, **_: Any) -> list[Row]:
        transaction = await self._claim([id])
        letter = self._postgres.letters.get(id)
        return [(id, transaction.id)] if letter is not None and letter.retry else []

    async def _remove_letter(self, id: int, **_: Any) -> list[Row]:
        assert self.transaction_now is not None
        if id not in self._postgres.letters:
            return []
        self.transaction_now.letters[id] = None
        return [(id,)]

    async def _dead_letter_again(self, id: int, **_: Any) -> list[Row]:
        transaction = await self._claim([id])
        letter = self._postgres.letters.get(id)
        if letter is None or not letter.retry:
            return []
        transaction.letters[id] = replace(letter, retry=False)
        return [(id,)]

    async def _dead_letter(self, idempotency_key: str, **columns: Any) -> list[Row]:
        transaction = await self._claim([idempotency_key])
        if idempotency_key in self._postgres.handled:
            return []
        name = columns["value"].decode()
        transaction.handled[idempotency_key] = name
        transaction.new_letters.append(Letter(name, {"idempotency_key": idempotency_key, **columns}))
        return [(0,)]


class WrittenPositions:
    """`Positions` without a database."""

    def __init__(
        self,
        chance: Chance,
        postgres: Postgres,
        *,
        locked: Callable[[], Collection[TopicPartition]],
        is_late: Callable[[TopicPartition], bool],
    ) -> None:
        """Nothing was written by this inbox.

        Args:
            chance: decides what fails.
            postgres: has the rows.
            locked: returns the partitions that inboxes have locked which have left the group.
            is_late: returns whether another inbox has a partition.
        """
        self._chance = chance
        self._postgres = postgres
        self._locked = locked
        self._is_late = is_late

    def read_now(self, topic_ids: Mapping[str, str]) -> dict[TopicPartition, GroupPosition]:
        self._chance.may_fail(psycopg.OperationalError("away"))
        return {
            tp: positions._position(row.next_offset, row.known)
            for tp, row in self._postgres.rows.items()
            if row.topic_id == topic_ids.get(tp.topic)
        }

    def still_handled(self, partitions: Sequence[TopicPartition]) -> set[TopicPartition]:
        return {*self._locked()}.intersection(partitions)

    def write_now(self, reached: Callable[[], PartitionPositions]) -> bool:
        if self._chance.fails():
            return False
        for tp, each in sorted(reached().items()):
            known = [HandledPosition(*pair) for pair in positions._known(each.position)]
            self._postgres.rows[tp] = PositionRow(each.topic_id, each.position.next_offset, known, self._is_late(tp))
            told = [tuple(pair) for pair in known]
            self._chance.say(f"writes {each.position.next_offset} of {tp.topic}/{tp.partition}, {told}")
        return True
