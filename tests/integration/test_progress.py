"""The progress topic as a new leader reads it: the last committed record, whoever else writes there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from confluent_kafka import Producer

from outbox_plugin.adapters import progress_reader
from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.adapters.kafka_transactional_log import KafkaTransactionalLog
from outbox_plugin.core.progress import OutboxIdentity, ProgressRecord
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Slice
from outbox_plugin.core.signing import Slot
from outbox_plugin.errors import Fenced, LogUnavailable
from outbox_plugin.settings import Settings
from tests.documents import CHECKOUT
from tests.harvesting import environment, last_progress, signer_of
from tests.support import PATIENCE

pytestmark = pytest.mark.integration

ROUNDS = 60
# Each round drops a producer a millisecond after its first record, when librdkafka adds a partition to the transaction.
DROP_PRODUCERS = f"""
import sys, time
from contextlib import suppress
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.adapters.kafka_transactional_log import KafkaTransactionalLog
from outbox_plugin.core.progress import OutboxIdentity, ProgressRecord
from outbox_plugin.core.shards import Slice
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.settings import Settings
from tests.harvesting import signer_of

settings, ends = Settings(), False

def should_wait():
    if ends:
        time.sleep(0.0012)
    return not ends

log = KafkaTransactionalLog(
    settings, KafkaNames.of(settings), Slice(0, 1), signer_of(settings), should_wait, lambda _: None
)
for generation in range({ROUNDS}):
    ends = False
    log.fence(generation)
    ends = True
    with suppress(LogUnavailable):
        log.publish((), ProgressRecord(OutboxIdentity("incarnation", "place"), "leader", generation, ()))
    log.close()
    print(generation)
"""


def record(leader_id: str) -> ProgressRecord:
    return ProgressRecord(OutboxIdentity("incarnation", "place"), leader_id, 0, ())


@contextmanager
def transaction(settings: Settings, topic: str, key: str, body: bytes) -> Iterator[Producer]:
    """A transaction that has written a record to the first partition, and is open."""
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers, "transactional.id": f"{topic}-{key}"})
    producer.init_transactions(20)
    producer.begin_transaction()
    headers = signer_of(settings).sign(Slot("progress", topic, 0), key.encode(), body)
    producer.produce(topic, key=key, value=body, partition=0, headers=headers)
    producer.flush(20)
    yield producer


def test_a_record_behind_an_open_transaction_is_not_passed_over(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_reader, "REQUEST_TIMEOUT_SECONDS", 2.0)
    names = KafkaNames.of(settings)
    with closing(KafkaAdmin(settings)) as admin:
        admin.ensure_topics(names, 1)
    with transaction(settings, names.progress_topic, "0-of-2", b"{}") as another:
        with transaction(settings, names.progress_topic, "0", record("leader").encode()) as ours:
            ours.commit_transaction(20)
        assert last_progress(settings) is None  # All that can be seen so far.
        with pytest.raises(LogUnavailable, match="not read to its end"):
            last_progress(settings, to_the_end=True)
        signer = signer_of(settings)
        with (
            closing(KafkaTransactionalLog(settings, names, Slice(0, 1), signer, lambda: False, lambda _: None)) as log,
            pytest.raises(LogUnavailable, match="the term had to end"),
        ):
            log.read_progress(fenced=True)
        another.abort_transaction(20)
    found = last_progress(settings, to_the_end=True)
    assert found is not None
    assert found.leader_id == "leader"


def test_a_leader_that_has_been_fenced_learns_it_when_it_publishes(settings: Settings, topic: str) -> None:
    names, signer = KafkaNames.of(settings), signer_of(settings)
    with closing(KafkaAdmin(settings)) as admin:
        admin.ensure_topics(names, 1)
    former, new = (
        KafkaTransactionalLog(settings, names, Slice(0, 1), signer, lambda: True, lambda _: None) for _ in range(2)
    )
    with closing(former), closing(new):
        former.fence(0)
        assert former.publish([OutboxRow(1, 5, topic, "k", "v", [], [], 9)], record("former"))
        new.fence(0)
        with pytest.raises(Fenced):
            former.publish([OutboxRow(2, 5, topic, "k", "v", [], [], 9)], record("former"))


def test_a_producer_can_be_dropped_while_it_begins_a_transaction(settings: Settings) -> None:
    """As where a term ends just when rows have come: librdkafka ended the whole process."""
    names = KafkaNames.of(settings)
    with closing(KafkaAdmin(settings)) as admin:
        admin.ensure_topics(names, 1)
    command = [sys.executable, "-c", DROP_PRODUCERS]
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environment(settings), capture_output=True, text=True, timeout=120 * PATIENCE
    )
    assert (done.returncode, done.stdout.split()[-1:]) == (0, [str(ROUNDS - 1)]), done.stderr
    assert last_progress(settings) is None
