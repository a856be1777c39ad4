"""Requests of a transaction that are held back and arrive late: nothing is lost, and nothing is repeated."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import psutil
import psycopg
import pytest

from outbox_plugin import Harvester, Settings
from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.adapters.kafka_transactional_log import KafkaTransactionalLog
from outbox_plugin.core.progress import OutboxIdentity, ProgressRecord
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Slice
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.relay.events import HarvestEvent, TermFinished
from outbox_plugin.relay.shard import LONG_WAIT
from outbox_plugin.status.reader import read_status
from tests.harvesting import (
    assert_exactly_once_in_order,
    consume,
    create_topic,
    drained,
    insert_numbered,
    signer_of,
)
from tests.kafka_proxy import ADD_PARTITIONS, END_TXN, INIT_PRODUCER_ID, PRODUCE, KafkaProxy, ProxiedKafka
from tests.processes import launched
from tests.support import eventually

pytestmark = pytest.mark.chaos

HELD_SHARE = {PRODUCE: 0.02, INIT_PRODUCER_ID: 0.1, ADD_PARTITIONS: 0.05, END_TXN: 0.15}
LARGE = 100_000  # Bytes of a request that holds rows.


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedKafka]:
    server = ProxiedKafka(tmp_path_factory.mktemp("proxied kafka"))
    with launched(server):
        yield server


@pytest.fixture
def bootstrap_servers(kafka: ProxiedKafka) -> str:
    """The broker itself: the test reads there, and only the harvester goes through the proxy."""
    return kafka.bootstrap_servers


def behind(settings: Settings, proxy: KafkaProxy) -> Settings:
    return settings.model_copy(update={"bootstrap_servers": f"127.0.0.1:{proxy.port}"})


def progress(leader_id: str) -> ProgressRecord:
    return ProgressRecord(OutboxIdentity("incarnation", "place"), leader_id, 0, ())


def insert_large(settings: Settings, topic: str, first: int, count: int) -> None:
    """Write rows that take several requests to publish; otherwise as `insert_numbered`."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(
            "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) "
            "SELECT %s, 'key-' || i %% 100, i, ARRAY['padding'], ARRAY[repeat('x', 500)] "
            "FROM generate_series(%s::bigint, %s::bigint) AS i",
            (topic, first, first + count - 1),
        )


class HoldsOneCommit:
    """Holds one EndTxn, and lets it arrive in the middle of the next transaction, behind its progress record."""

    def __init__(self, proxy: KafkaProxy) -> None:
        self._proxy = proxy
        self.armed = False
        self.repeated = False
        self._progress_is_written = False
        self.arrived = False

    def __call__(self, api: int, body: bytes) -> bool:
        if self.armed and api == END_TXN:
            self.armed = False
            return True
        self.repeated = self.repeated or (api == END_TXN and bool(self._proxy.held))
        if self.repeated and api == PRODUCE and not self.arrived:
            if self._progress_is_written and len(body) > LARGE:
                self.arrived = True
                time.sleep(0.1)  # The broker writes what has gone before,
                self._proxy.release()
                time.sleep(0.1)  # and ends the transaction before the rest arrives.
            self._progress_is_written = self._progress_is_written or b"-progress" in body
        return False


def test_a_commit_that_arrives_in_the_next_transaction_loses_nothing(kafka: ProxiedKafka, settings: Settings) -> None:
    topic = create_topic(settings, f"{settings.group}-events")
    with kafka.proxy().running() as proxy:
        proxy.hold = hold = HoldsOneCommit(proxy)
        with Harvester(behind(settings, proxy)):
            eventually(lambda: END_TXN in proxy.forwarded, 30)
            hold.armed = True
            insert_numbered(settings, topic, 1, 2)
            eventually(lambda: hold.repeated, 30)
            insert_large(settings, topic, 3, 10_000)
            drained(settings)
            eventually(lambda: hold.arrived, 30)
    assert_exactly_once_in_order(consume(settings, topic), 1, 10_002)


def test_a_leader_whose_commit_is_not_answered_says_so_long_before_it_gives_up(
    kafka: ProxiedKafka, settings: Settings
) -> None:
    topic = create_topic(settings, f"{settings.group}-events")
    with kafka.proxy().running() as proxy, Harvester(behind(settings, proxy)):
        eventually(lambda: END_TXN in proxy.forwarded, 30)
        proxy.hold = lambda api, _: api == END_TXN
        insert_numbered(settings, topic, 1, 2)

        def reported() -> list[tuple[bool, str | None]]:
            return [(shard.leader is not None, shard.trouble) for shard in read_status(settings).shards]

        eventually(lambda: (True, LONG_WAIT) in reported(), 20)
        proxy.hold = lambda *_: False
        proxy.release()
        drained(settings)
        eventually(lambda: (True, None) in reported(), 20)
    assert_exactly_once_in_order(consume(settings, topic), 1, 2)


def test_a_record_that_arrives_after_its_transaction_was_aborted_is_not_repeated(
    kafka: ProxiedKafka, settings: Settings
) -> None:
    """As where a term ends while its producer tries to repeat a request: the producer aborts before it is dropped.

    The abort's marker has the record's own epoch. A broker that does not verify transactions takes the record.
    """
    topic = create_topic(settings, f"{settings.group}-events")
    row = OutboxRow(1, 5, topic, "key-1", "1", [], [], 9)
    with closing(KafkaAdmin(settings)) as admin:
        admin.ensure_topics(KafkaNames.of(settings), 1)
    with kafka.proxy().running() as proxy:
        # A client that knows one broker forgets it when the connection breaks, unless it is told not to.
        proxied = behind(settings, proxy).model_copy(update={"kafka": {"metadata.recovery.strategy": "none"}})

        def log() -> KafkaTransactionalLog:
            return KafkaTransactionalLog(
                proxied,
                KafkaNames.of(settings),
                Slice(0, 1),
                signer_of(settings),
                lambda: not proxy.held,
                lambda _: None,
            )

        with closing(log()) as former:
            former.fence(0)
            proxy.hold = lambda api, body: api == PRODUCE and topic.encode() in body
            with pytest.raises(LogUnavailable, match="had to end"):
                former.publish([row], progress("former"))
        eventually(lambda: END_TXN in proxy.forwarded, 10)
        proxy.hold = lambda *_: False
        late, proxy.held = proxy.held, []
        with closing(log()) as new:
            new.fence(0)  # It waits until the abort has written its markers.
            proxy.held = late
            proxy.release()
            time.sleep(0.1)  # The broker takes it, or refuses it.
            assert new.publish([row], progress("new"))
    assert [record.value for record in consume(settings, topic)] == ["1"]


class HoldsAtRandom:
    """Holds requests of transactions now and then, for a while that is counted in other requests."""

    def __init__(self, proxy: KafkaProxy, seed: int) -> None:
        self._proxy = proxy
        self._random = random.Random(seed)
        self._until_release = 0
        self.count = 0

    def __call__(self, api: int, body: bytes) -> bool:
        if self._proxy.held:
            self._until_release -= 1
            if self._until_release <= 0:
                self._proxy.release()
        if self._random.random() > HELD_SHARE.get(api, 0.0):
            return False
        self.count += 1
        self._until_release = self._random.randint(1, 8)
        return True


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_requests_that_arrive_late_neither_lose_nor_repeat(kafka: ProxiedKafka, settings: Settings, seed: int) -> None:
    topic = create_topic(settings, f"{settings.group}-events")
    with kafka.proxy().running() as proxy:
        hold = HoldsAtRandom(proxy, seed)
        with Harvester(behind(settings, proxy)):
            eventually(lambda: END_TXN in proxy.forwarded, 30)
            proxy.hold = hold
            batches = 0
            while batches < 20 or (hold.count <= 3 and batches < 100):
                insert_large(settings, topic, 1 + batches * 2_000, 2_000)
                batches += 1
                if batches % 4 == 0:
                    drained(settings)
            drained(settings)
        proxy.release()
    assert hold.count > 3
    assert_exactly_once_in_order(consume(settings, topic), 1, batches * 2_000)


def test_a_leader_that_kafka_does_not_answer_leaves_no_client_behind(kafka: ProxiedKafka, settings: Settings) -> None:
    topic = create_topic(settings, f"{settings.group}-events")
    with kafka.proxy().running() as proxy:
        stuck = threading.Event()

        def hold(api: int, body: bytes) -> bool:
            while stuck.is_set():
                time.sleep(0.01)
            return False

        proxy.hold = hold
        events: list[HarvestEvent] = []
        with Harvester(behind(settings, proxy), observe=events.append):
            insert_numbered(settings, topic, 1, 100)
            drained(settings)
            threads = psutil.Process().num_threads()
            stuck.set()
            insert_numbered(settings, topic, 101, 100)
            eventually(lambda: any(isinstance(event, TermFinished) for event in events), 30)
            stuck.clear()
            drained(settings)
            eventually(lambda: psutil.Process().num_threads() <= threads, 30)
    assert_exactly_once_in_order(consume(settings, topic), 1, 200)
