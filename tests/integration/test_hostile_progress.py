"""Somebody writes to the progress topic without knowing the secret, or deletes it: no row is lost or repeated."""

from __future__ import annotations

import random
import threading
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from outbox_plugin import Harvester
from outbox_plugin.adapters.harvester_registration import HarvesterRegistration
from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.adapters.kafka_transactional_log import KafkaTransactionalLog
from outbox_plugin.core.progress import ProgressRecord, Publication
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Slice
from outbox_plugin.core.signing import HEADER, Signer, Slot
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings
from outbox_plugin.status.reader import read_status
from tests.harvesting import (
    assert_exactly_once_in_order,
    backlog,
    consume,
    delete_topic,
    drained,
    environment,
    harvesters,
    insert_numbered,
    last_progress,
    publish_but_kill_before_the_purge,
    run_outbox,
    signer_of,
)
from tests.integration.test_hostile_records import Body, records, write
from tests.support import eventually

pytestmark = pytest.mark.integration

ROWS = 1_000
_POSTGRES_EPOCH = 946_684_800


def all_rows(settings: Settings) -> Publication:
    """What a record would say had all rows that are there been published."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        rows = connection.execute(
            "SELECT id, ((extract(epoch FROM create_time) - %s) * 1000000)::bigint FROM outbox ORDER BY id",
            [_POSTGRES_EPOCH],
        ).fetchall()
    return Publication.of([OutboxRow(id_, time, "t", "k", "v", [], [], 2**40) for id_, time in rows])


def forged(settings: Settings, copies: list[Body]) -> list[Body]:
    """Records that name all rows there are, with whatever in the place of a signature; and others that are none."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        identity = HarvesterRegistration(settings, connection).check_outbox()
    progress = ProgressRecord(identity, "attacker", 0, (all_rows(settings),), 0, 2**60, 1, -1).encode()
    key, value, headers = copies[-1]
    slot = Slot("progress", KafkaNames.of(settings).progress_topic, 0)
    by_another = Signer(b"x" * 32).sign(slot, b"0", progress)
    return [
        (b"0", progress, []),
        (b"0", progress, headers),
        (b"0", progress, by_another),
        (b"0", progress, [*by_another, *headers]),
        (b"0", value, [*headers, *headers]),
        (b"0", value, [(name, bytes(body or b"")[:16]) for name, body in headers if not isinstance(body, str)]),
        (b"0-of-2", value, headers),
        (b"0", None, headers),
        (b"0", b"", headers),
        (b"0", b"[" * 100_000, []),
        (b"0", b"{}", [(HEADER, b"x" * 800_000)]),
        (key, (value or b"") + b" ", headers),
    ]


def test_a_forged_record_deletes_nothing(settings: Settings, topic: str, tmp_path: Path) -> None:
    names = KafkaNames.of(settings)
    with harvesters(settings, tmp_path / "first") as [first]:
        insert_numbered(settings, topic, 0, 10)
        drained(settings)
        first.kill()
    insert_numbered(settings, topic, 10, ROWS)
    write(settings, names.progress_topic, forged(settings, records(settings, names.progress_topic)))
    with Harvester(settings):
        drained(settings)
        eventually(lambda: "signed by no harvester" in (read_status(settings).shards[0].trouble or ""), 30)
    assert_exactly_once_in_order(consume(settings, topic), 0, ROWS + 10)


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_copies_do_not_hide_the_last_record(settings: Settings, topic: str, tmp_path: Path, order: str) -> None:
    """All that ever stood in the topic is written again behind it, many times: more than a read's tail."""
    names = KafkaNames.of(settings)
    for round_ in range(20):
        with Harvester(settings):
            insert_numbered(settings, topic, round_, 1)
            drained(settings)
    insert_numbered(settings, topic, 20, ROWS)
    copies = records(settings, names.progress_topic)
    publish_but_kill_before_the_purge(settings, tmp_path)
    before = last_progress(settings, to_the_end=True)
    for _ in range(3):
        write(settings, names.progress_topic, copies if order == "ascending" else copies[::-1])
    write(settings, names.progress_topic, forged(settings, copies))
    assert before is not None
    assert last_progress(settings, to_the_end=True) == before
    with Harvester(settings):
        drained(settings)
    assert_exactly_once_in_order(consume(settings, topic), 0, ROWS + 20)


def test_an_attack_that_does_not_cease_costs_no_row(settings: Settings, topic: str, tmp_path: Path) -> None:
    """Leaders are killed one after the other, while somebody writes whatever stands in the control topics again."""
    names = KafkaNames.of(settings)
    over = threading.Event()
    rng = random.Random(7)

    def attack() -> None:
        while not over.is_set():
            for control_topic in (names.leader_topic, names.progress_topic):
                found = records(settings, control_topic)[-200:]
                copies = [*found[-3:], *rng.choices(found, k=10)] if found else []
                tampered = [(key, (value or b"")[::-1], headers) for key, value, headers in copies]
                write(settings, control_topic, [*copies, *tampered, *((key, None, h) for key, _, h in copies[:2])])

    with harvesters(settings, tmp_path, 1) as [first]:
        eventually(first.leads, 60)
        attacker = threading.Thread(target=attack)
        attacker.start()
        try:
            for round_ in range(5):
                with harvesters(settings, tmp_path / str(round_), 1) as [next_]:
                    insert_numbered(settings, topic, round_ * ROWS, ROWS)
                    eventually(lambda: backlog(settings) < ROWS, 60)
                    next_.kill()
                first.kill()
            with harvesters(settings, tmp_path / "last", 1):
                drained(settings)
        finally:
            over.set()
            attacker.join()
    assert_exactly_once_in_order(consume(settings, topic), 0, 5 * ROWS)


def test_a_copy_of_a_record_that_was_never_committed_deletes_nothing(settings: Settings, topic: str) -> None:
    """A leader dies in a transaction, and somebody writes its record again before the next leader reads."""
    names = KafkaNames.of(settings)
    progress_topic = names.progress_topic
    with Harvester(settings):
        insert_numbered(settings, topic, 0, 10)
        drained(settings)
    insert_numbered(settings, topic, 10, ROWS)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        identity = HarvesterRegistration(settings, connection).check_outbox()
    log = KafkaTransactionalLog(settings, names, Slice(0, 1), signer_of(settings), lambda: True, lambda _: None)
    log.fence(0)
    log.read_progress(fenced=True)
    log._open.begin_transaction()
    log._produce_progress(ProgressRecord(identity, "dead", ROWS, (all_rows(settings),), 0, 2**60))
    log._open.flush(20)
    write(settings, progress_topic, [records(settings, progress_topic)[-1]] * 3)
    log.close()
    with Harvester(settings):
        drained(settings)
    assert_exactly_once_in_order(consume(settings, topic), 0, ROWS + 10)


def test_a_deleted_record_of_rows_in_flight_is_missed(settings: Settings, topic: str, tmp_path: Path) -> None:
    """The rows would be published again; that is for an operator to decide."""
    insert_numbered(settings, topic, 0, ROWS)
    publish_but_kill_before_the_purge(settings, tmp_path)
    delete_topic(settings, KafkaNames.of(settings).progress_topic)
    refused = run_outbox("harvest", env=environment(settings))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "the progress topic lacks the last record of the shard 0" in refused.stderr
    assert backlog(settings) == ROWS
    with harvesters(settings, tmp_path / "adopting", arguments=("--adopt",)):
        drained(settings)
    assert len(consume(settings, topic)) == 2 * ROWS
    with Harvester(settings):
        insert_numbered(settings, topic, 0, 1)
        drained(settings)


def test_a_topic_that_is_deleted_after_a_clean_stop_is_recreated(settings: Settings, topic: str) -> None:
    for round_ in range(2):
        with Harvester(settings):
            insert_numbered(settings, topic, round_ * 10, 10)
            drained(settings)
        delete_topic(settings, KafkaNames.of(settings).progress_topic)
    assert_exactly_once_in_order(consume(settings, topic), 0, 20)


def test_a_record_of_a_version_that_did_not_sign_counts_once(settings: Settings, topic: str, tmp_path: Path) -> None:
    """An outbox that was harvested before it was migrated: its last record is believed, as there is no other."""
    names = KafkaNames.of(settings)
    insert_numbered(settings, topic, 0, ROWS)
    publish_but_kill_before_the_purge(settings, tmp_path)
    record = last_progress(settings, to_the_end=True)
    assert record is not None
    delete_topic(settings, names.progress_topic)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("ALTER TABLE outbox_identity DROP COLUMN term, DROP COLUMN recorded, DROP COLUMN unsigned")
        connection.execute("DELETE FROM outbox_migration WHERE name >= '0042' AND name < '0044'")
    migrate(settings)
    with closing(KafkaAdmin(settings)) as admin:
        admin.ensure_topics(names, 1)
    unsigned: Body = (b"0", ProgressRecord(record.identity, "old", 0, record.publications).encode(), [])
    write(settings, names.progress_topic, [unsigned])
    with Harvester(settings):
        drained(settings)
    assert_exactly_once_in_order(consume(settings, topic), 0, ROWS)
    insert_numbered(settings, topic, ROWS, 10)
    later = ProgressRecord(record.identity, "old", 0, (all_rows(settings),)).encode()
    write(settings, names.progress_topic, [(b"0", later, [])])
    with Harvester(settings):
        drained(settings)
    assert_exactly_once_in_order(consume(settings, topic), 0, ROWS + 10)
