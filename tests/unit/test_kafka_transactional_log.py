"""Transactions that fail, on a producer without a broker."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_plugin import Settings
from outbox_plugin.adapters import kafka_transactional_log, topic_metadata
from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.adapters.kafka_transactional_log import KafkaTransactionalLog
from outbox_plugin.adapters.writable_topics import UnwritableTopics, WritableTopics
from outbox_plugin.core.progress import OutboxIdentity, ProgressRecord
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Slice
from outbox_plugin.core.signing import Signer
from outbox_plugin.errors import Fenced, LogUnavailable, RowsRefused, TopicsAway
from tests.clock import SimulatedTime

PROGRESS = ProgressRecord(OutboxIdentity("incarnation", "place"), "leader", 1, ())
GOOD = OutboxRow(1, 5, "orders", "k", "v", [], [], 9)
BAD = GOOD._replace(id=2, header_keys=["a"])
DOWN = KafkaException(KafkaError(KafkaError._TRANSPORT))


class Producer:
    """It counts the transactions that it begins."""

    def __init__(self) -> None:
        self.transactions = 0
        self.begins: Callable[[], object] = lambda: None

    def begin_transaction(self) -> None:
        self.begins()
        self.transactions += 1

    def produce(self, *_: Any, **__: Any) -> None:
        """It goes nowhere."""

    def purge(self) -> None:
        """Nothing is kept."""

    def flush(self, _: float) -> int:
        return 0

    def __len__(self) -> int:
        return 0

    def commit_transaction(self, _: float) -> None:
        """It is committed at once."""

    def abort_transaction(self, _: float) -> None:
        """It is aborted at once."""


class SmallTopic(Producer):
    """Its topic takes batches of some bytes. Once it has refused one, the transaction has failed."""

    TAKES = 1_000

    def __init__(self, report: Callable[[KafkaError, Any], None]) -> None:
        super().__init__()
        self._report = report
        self._sent: list[SimpleNamespace] = []
        self._failed = False

    def begin_transaction(self) -> None:
        super().begin_transaction()
        self._sent, self._failed = [], False

    def produce(self, topic: str, value: bytes | str, key: bytes | str, *_: Any, **__: Any) -> None:
        if self._failed:
            raise KafkaException(KafkaError(KafkaError._STATE))
        if topic == "orders":
            self._sent.append(SimpleNamespace(topic=lambda: topic, key=str(key).encode, value=str(value).encode))

    def flush(self, _: float) -> int:
        sent, self._sent = self._sent, []
        if sum(len(record.value()) for record in sent) > self.TAKES:
            self._failed = True
            for record in sent:
                self._report(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), record)
        return 0

    def __len__(self) -> int:
        return len(self._sent)

    def commit_transaction(self, _: float) -> None:
        if self._failed:
            raise KafkaException(KafkaError(KafkaError._STATE))


@pytest.fixture
def producer() -> Producer:
    return Producer()


@pytest.fixture
def log(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> KafkaTransactionalLog:
    settings = Settings(dsn="postgresql://nowhere/none", bootstrap_servers="127.0.0.1:1")
    log = KafkaTransactionalLog(
        settings, KafkaNames.of(settings), Slice(0, 1), Signer(b"s" * 32), lambda: True, lambda _: None
    )
    monkeypatch.setattr(log, "_producer", producer)
    monkeypatch.setattr(WritableTopics, "unwritable", lambda *_: UnwritableTopics())
    return log


def test_a_transaction_that_cannot_begin_says_nothing_of_the_last_ones_rows(
    log: KafkaTransactionalLog, producer: Producer
) -> None:
    with pytest.raises(RowsRefused):
        log.publish([GOOD, BAD], PROGRESS)

    def fail() -> None:
        raise DOWN

    producer.begins = fail
    with pytest.raises(LogUnavailable):
        log.publish([GOOD], PROGRESS)


@pytest.mark.parametrize("code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._STATE])
def test_a_topic_that_may_not_be_written_to_is_found(
    log: KafkaTransactionalLog, producer: Producer, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Also where the transaction has failed before all rows were handed over: the client says no more than that."""
    monkeypatch.setattr(KafkaAdmin, "writable", lambda *_: {"orders"})

    def fail(topic: str, *_: Any, **__: Any) -> None:
        if topic == "secret":
            raise KafkaException(KafkaError(code))

    monkeypatch.setattr(producer, "produce", fail)
    monkeypatch.setattr(producer, "commit_transaction", lambda _: fail("secret"))
    with pytest.raises(RowsRefused) as refused:
        log.publish([GOOD, GOOD._replace(id=2, topic="secret")], PROGRESS)
    assert refused.value.refusals.keys() == {2}


def test_a_topic_that_does_not_take_what_our_clock_says_is_left_alone(
    log: KafkaTransactionalLog, producer: Producer
) -> None:
    wrong = KafkaError(KafkaError.INVALID_TIMESTAMP)

    def fail(_: float) -> None:
        log._records._failed_reports.append((wrong, "orders", b"k", b"v"))
        raise KafkaException(wrong)

    producer.commit_transaction = fail  # type: ignore[method-assign]
    with pytest.raises(TopicsAway, match="orders: the clock"):
        log.publish([GOOD], PROGRESS)


@pytest.mark.parametrize("produces", [True, False])
def test_a_producer_that_another_leader_has_fenced_is_known_by_what_its_flush_raises(
    log: KafkaTransactionalLog, producer: Producer, monkeypatch: pytest.MonkeyPatch, *, produces: bool
) -> None:
    """What it raises for a record that it does not take any more only says that it is broken."""

    def refuse(code: int) -> NoReturn:
        raise KafkaException(KafkaError(code, fatal=True))

    if not produces:
        monkeypatch.setattr(producer, "produce", lambda *_, **__: refuse(KafkaError._FATAL))
    monkeypatch.setattr(Producer, "__len__", lambda _: 1)
    monkeypatch.setattr(producer, "flush", lambda _: refuse(KafkaError._FENCED))
    with pytest.raises(Fenced):
        log.publish([GOOD], PROGRESS)


def test_only_the_first_bad_row_costs_a_transaction(log: KafkaTransactionalLog, producer: Producer) -> None:
    """The next ones are refused before one begins; the producer stays as it is."""
    with pytest.raises(RowsRefused):
        log.publish([GOOD, BAD], PROGRESS)
    assert log.publish([GOOD], PROGRESS)
    assert (producer.transactions, log.in_doubt) == (2, False)
    with pytest.raises(RowsRefused) as refused:
        log.publish([GOOD, BAD, BAD._replace(id=3, header_keys=None)], PROGRESS)  # type: ignore[arg-type]
    assert refused.value.refusals.keys() == {2, 3}
    assert (producer.transactions, log.in_doubt) == (2, False)


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_a_thousand_rows_that_are_too_large_cost_ten_transactions_at_most_or_let_the_others_pass(
    log: KafkaTransactionalLog, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    """Without compression, what is no smaller than a refused row is refused with it. With it, it waits."""
    settings = log._settings.model_copy(update={"kafka": {"compression.type": compression}})
    monkeypatch.setattr(log, "_settings", settings)
    producer = SmallTopic(log._records.on_delivery)
    monkeypatch.setattr(log, "_producer", producer)
    rows = [GOOD._replace(id=n, key=f"k{n}", value="x" * (2_000 + n % 9 if n % 2 else 900)) for n in range(2_000)]
    refused: set[int] = set()
    maybe_oversize: set[int] = set()
    for _ in range(10):
        try:
            if log.publish([row for row in rows if row.id not in refused | maybe_oversize], PROGRESS):
                break
        except RowsRefused as error:
            refused |= error.refusals.keys()
            maybe_oversize |= error.maybe_oversize
    odd = {row.id for row in rows if row.id % 2}
    assert refused | maybe_oversize == odd
    assert maybe_oversize == set() if compression == "none" else len(refused) < 5


def test_rows_before_a_refused_one_are_not_refused_with_it(log: KafkaTransactionalLog) -> None:
    """They were accepted a moment ago, although they are larger: the topic's limit has changed, or they compress."""
    records = log._records
    records.reset()
    records._rows = [GOOD._replace(id=n, key=f"k{n}", value="x" * size) for n, size in enumerate((3_000, 2_000, 2_500))]
    records._limits["orders"] = 0
    records._group = [records._rows[1]]
    report = SimpleNamespace(topic=lambda: "orders", key=lambda: b"k1", value=lambda: b"x" * 2_000)
    records.on_delivery(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), report)  # type: ignore[arg-type]
    assert records.interpret_failures().refusals.keys() == {1}
    assert records.refusals_by_size().keys() == {2}


def nothing_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    """A record waits for its acknowledgement. Returns the time, which passes only while that is waited for."""
    clock = SimulatedTime()
    for module in (kafka_transactional_log, topic_metadata):
        monkeypatch.setattr(module, "time", clock)

    def flush(_: Producer, seconds: float) -> int:
        clock.sleep(seconds)
        return 1

    monkeypatch.setattr(Producer, "flush", flush)
    monkeypatch.setattr(Producer, "__len__", lambda _: 1)
    return clock


def test_a_topic_with_too_few_replicas_in_sync_is_left_alone(
    log: KafkaTransactionalLog, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records are never acknowledged, and nobody says why. Those of other topics are."""
    nothing_is_acknowledged(monkeypatch)
    monkeypatch.setattr(WritableTopics, "without_leader", lambda *_: False)
    monkeypatch.setattr(WritableTopics, "stays_out_of_sync", lambda *_: True)
    silent: set[str] = set()
    monkeypatch.setattr(WritableTopics, "silent", lambda _, topics: silent.update(topics))
    purged = KafkaError(KafkaError._PURGE_INFLIGHT)
    monkeypatch.setattr(Producer, "purge", lambda _: log._records._failed_reports.append((purged, "short", b"k", b"v")))
    assert not log.publish([GOOD, GOOD._replace(id=2, topic="short")], PROGRESS)
    assert (silent, log.in_doubt) == ({"short"}, True)


def test_a_term_that_has_to_end_waits_for_no_broker_that_does_not_answer(
    log: KafkaTransactionalLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is acknowledged, and the brokers do not say why. Nothing was published then: no commit is tried."""
    clock = nothing_is_acknowledged(monkeypatch)
    asked: list[str] = []

    def no_answer(_: Producer, topic: str, timeout: float) -> NoReturn:
        asked.append(topic)
        clock.sleep(timeout)
        raise DOWN

    monkeypatch.setattr(kafka_transactional_log, "STALLED_SECONDS", kafka_transactional_log.SILENT_SECONDS)
    monkeypatch.setattr(topic_metadata, "ATTEMPT_SECONDS", 0.05)
    monkeypatch.setattr(Producer, "list_topics", no_answer, raising=False)
    monkeypatch.setattr(log, "_should_wait", lambda: not asked)
    monkeypatch.setattr(log._records._topics, "_should_wait", lambda: not asked)
    with pytest.raises(LogUnavailable, match="had to end"):
        log.publish([GOOD], PROGRESS)
    assert len(asked) == 1


@pytest.mark.parametrize("refused", ["purge", "abort_transaction"])
def test_a_producer_that_refuses_to_be_emptied_is_let_go_of_all_the_same(
    log: KafkaTransactionalLog, producer: Producer, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    def refuse(*_: float) -> None:
        raise KafkaException(KafkaError(KafkaError._FATAL))

    monkeypatch.setattr(producer, refused, refuse)
    log.close()
    with pytest.raises(LogUnavailable, match="closed"):
        log.publish((), PROGRESS)
