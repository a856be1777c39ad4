"""A row that Kafka refuses harms itself only: its key waits or it is put aside, and order is kept."""

from __future__ import annotations

import json
import random
import string

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from outbox_plugin import Harvester, Settings, operate
from outbox_plugin.core.record_size import record_body_bytes
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.status.reader import read_status
from tests.harvesting import backlog, by_key, consume, create_topic, drained, environment, insert, run_outbox
from tests.support import eventually

pytestmark = pytest.mark.integration

BATCH_BYTES = 61  # What a batch has besides its records.
TOO_LARGE = "x" * 2_000_000  # More than the client and the broker take.


def with_unequal_headers(settings: Settings, topic: str, key: str, value: str) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(
            "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys) VALUES (%s, %s, %s, '{a,b}')",
            (topic, key, value),
        )


def noise(length: int) -> str:
    """A text that cannot be compressed well."""
    return "".join(random.choices(string.ascii_letters, k=length))


def mend(settings: Settings, assignment: str) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(f"UPDATE outbox SET {assignment}")


@pytest.fixture(params=["exactly-once", "at-least-once"])
def either(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    return settings.model_copy(update={"delivery": request.param})


def test_a_bad_row_parks_its_key_and_others_flow(either: Settings, topic: str) -> None:
    """Bad row and followers in one window; released, the key's order is as if nothing had happened."""
    insert(either, topic, [("good", "1"), ("bad", "1")])
    with_unequal_headers(either, topic, "bad", "2")
    insert(either, topic, [("bad", "3"), ("good", "2"), ("bad", "4")])
    with Harvester(either):
        eventually(lambda: backlog(either) == 3, 30)
        insert(either, topic, [("good", "3"), ("bad", "5")])
        eventually(lambda: backlog(either) == 4, 30)
        [parked_key] = operate.parked_keys(either)
        assert (parked_key.topic, parked_key.key, parked_key.reason) == (
            topic,
            "bad",
            "2 header keys, but 0 header values",
        )
        assert read_status(either).parked_keys == 1
        mend(either, "kafka_header_keys = '{}'")
        assert by_key(consume(either, topic)) == {"good": ["1", "2", "3"], "bad": ["1"]}
        assert len(operate.release(either, topic=topic, key="bad")) == 1
        drained(either)
    assert by_key(consume(either, topic)) == {"good": ["1", "2", "3"], "bad": ["1", "2", "3", "4", "5"]}
    assert read_status(either).parked_keys == 0


def test_a_release_before_the_row_is_mended_parks_it_again(settings: Settings, topic: str) -> None:
    insert(settings, topic, [("k", TOO_LARGE), ("k", "after")])
    with Harvester(settings):
        eventually(lambda: operate.parked_keys(settings), 30)
        operate.release(settings)
        eventually(lambda: operate.parked_keys(settings), 30)
        insert(settings, topic, [("other", "flows")])
        eventually(lambda: backlog(settings) == 2, 30)
    assert by_key(consume(settings, topic)) == {"other": ["flows"]}


def test_what_is_parked_stays_so_for_the_next_leader(settings: Settings, topic: str) -> None:
    insert(settings, topic, [("k", TOO_LARGE), ("k", "after")])
    with Harvester(settings):
        eventually(lambda: operate.parked_keys(settings), 30)
    with Harvester(settings):
        insert(settings, topic, [("other", "flows")])
        eventually(lambda: backlog(settings) == 2, 30)
        mend(settings, "kafka_value = 'small' WHERE length(kafka_value) > 1000")
        operate.release(settings)
        drained(settings)
    assert by_key(consume(settings, topic)) == {"k": ["small", "after"], "other": ["flows"]}


def test_a_row_larger_than_its_topic_takes_is_found_among_many(either: Settings, group: str) -> None:
    """The broker refuses a whole batch; which row made it so is found out, and all others arrive in order."""
    topic = f"{group}-narrow"
    admin = AdminClient({"bootstrap.servers": either.bootstrap_servers})
    [made] = admin.create_topics([NewTopic(topic, num_partitions=1, config={"max.message.bytes": "20000"})]).values()
    made.result(60)
    small = [(f"k{number % 7}", str(number)) for number in range(3_000)]
    insert(either, topic, [*small[:2_000], ("k3", "x" * 50_000), *small[2_000:]])
    with Harvester(either):
        eventually(lambda: operate.parked_keys(either), 60)
        eventually(lambda: backlog(either) == 1 + sum(key == "k3" for key, _ in small[2_000:]), 60)
        mend(either, "kafka_value = 'short' WHERE length(kafka_value) > 20000")
        operate.release(either)
        drained(either)
    seen = by_key(consume(either, topic))
    before, after = ([value for key, value in part if key == "k3"] for part in (small[:2_000], small[2_000:]))
    assert seen["k3"] == [*before, "short", *after]
    assert sum(map(len, seen.values())) == 3_001


def test_rows_that_differ_from_one_that_is_too_large_in_its_headers_alone_are_not_taken_for_it(
    either: Settings, group: str
) -> None:
    """A delivery that fails is reported without its headers."""
    settings = either.model_copy(update={"bad_rows": "dead-letter"})
    topic = f"{group}-narrow"
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    [made] = admin.create_topics([NewTopic(topic, num_partitions=1, config={"max.message.bytes": "20000"})]).values()
    made.result(20)
    insert(settings, topic, [("k", "same"), ("k", "same")])
    mend(settings, "kafka_header_keys = '{h}', kafka_header_values = ARRAY[repeat('x', 50000)] WHERE id = 2")
    insert(settings, topic, [("k", "same"), ("k", "last")])
    with Harvester(settings):
        drained(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        assert connection.execute("SELECT kafka_header_keys FROM outbox_dead_letter").fetchall() == [(["h"],)]
    assert by_key(consume(settings, topic)) == {"k": ["same", "same", "last"]}


def test_rows_of_the_very_size_that_a_topic_takes_pass_and_one_byte_more_does_not(either: Settings, group: str) -> None:
    settings = either.model_copy(update={"bad_rows": "dead-letter"})
    row = OutboxRow(0, 0, "", "ключ", "x" * 20_000, ["ä" * 70, "empty"], ["texts" * 20, None], 0)  # type: ignore[list-item]
    body = record_body_bytes(row)
    topic = f"{group}-narrow"
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    takes = {"max.message.bytes": str(BATCH_BYTES + 3 + body)}  # The record's own length takes 3 bytes.
    [made] = admin.create_topics([NewTopic(topic, num_partitions=1, config=takes)]).values()
    made.result(60)
    insert(settings, topic, [(row.key, "x" * (20_000 + number % 2)) for number in range(40)])
    mend(
        settings,
        f"kafka_header_keys = ARRAY['{'ä' * 70}', 'empty'], kafka_header_values = ARRAY['{'texts' * 20}', NULL]",
    )
    with Harvester(settings):
        drained(settings)
    assert [len(value or "") for value in by_key(consume(settings, topic))[row.key]] == [20_000] * 20


def test_rows_that_are_too_large_do_not_hold_up_the_others(settings: Settings, group: str, topic: str) -> None:
    """Where records are compressed, only a transaction for each tells which of them fit."""
    settings = settings.model_copy(update={"bad_rows": "dead-letter", "kafka": {"compression.type": "lz4"}})
    narrow = f"{group}-narrow"
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    [made] = admin.create_topics([NewTopic(narrow, 1, config={"max.message.bytes": "20000"})]).values()
    made.result(60)
    insert(settings, narrow, [(f"large-{number}", noise(50_000)) for number in range(100)])
    insert(settings, topic, [(f"k{number}", "good") for number in range(100)])
    with Harvester(settings):
        eventually(lambda: backlog(settings) < 100, 60)
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            [dead_letters] = connection.execute("SELECT count(*) FROM outbox_dead_letter").fetchone() or [0]
            [good] = connection.execute("SELECT count(*) FROM outbox WHERE kafka_value = 'good'").fetchone() or [0]
    assert good == 0
    assert dead_letters < 50


def allow_age(settings: Settings, topic: str, milliseconds: int) -> None:
    """Let the topic's brokers refuse records that are older, by their own clock."""
    entry = ConfigEntry(
        "message.timestamp.before.max.ms", str(milliseconds), incremental_operation=AlterConfigOpType.SET
    )
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    [changed] = admin.incremental_alter_configs(
        [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])]
    ).values()
    changed.result(20)


def test_a_broker_that_finds_our_clock_wrong_refuses_no_row(either: Settings, group: str) -> None:
    """It refuses the batch, and librdkafka calls each of several records invalid: the topic waits."""
    topic, other = create_topic(either, f"{group}-late", 1), create_topic(either, f"{group}-other")
    allow_age(either, topic, 0)
    inserted = 0

    def is_held() -> bool:
        nonlocal inserted
        if backlog(either) == 0:  # Nothing is too old if it arrives within the same millisecond.
            insert(either, topic, [(f"k{key}", str(inserted)) for key in range(20)])
            inserted += 1
        return "the clock of this machine" in (read_status(either).shards[0].trouble or "")

    with Harvester(either):
        eventually(is_held, 60)
        insert(either, other, [("k", "flows")])
        eventually(lambda: by_key(consume(either, other)) == {"k": ["flows"]}, 60)
        assert operate.parked_keys(either) == []
        allow_age(either, topic, 86_400_000)
        drained(either)
    seen = by_key(consume(either, topic))
    assert {key: list(dict.fromkeys(values)) for key, values in seen.items()} == {
        f"k{key}": [str(number) for number in range(inserted)] for key in range(20)
    }


@pytest.mark.parametrize("missing", ["not there", "never-made"])
def test_a_topic_that_is_not_to_be_had_waits_as_a_whole(settings: Settings, strict: str, missing: str) -> None:
    settings = settings.model_copy(update={"bootstrap_servers": strict})
    there = create_topic(settings, f"{settings.group}-there")
    name = f"{settings.group}-{missing}"
    insert(settings, name, [("a", "1"), ("b", "1")])
    insert(settings, there, [("a", "1")])
    with Harvester(settings):
        eventually(lambda: backlog(settings) == 2, 30)
        eventually(lambda: operate.parked_keys(settings), 30)  # Rows of other topics do not wait for the look-up.
        [parked_key] = operate.parked_keys(settings)
        assert (parked_key.topic, parked_key.key) == (name, None)
        assert name in parked_key.reason
        if " " not in name:
            create_topic(settings, name)
            operate.release(settings, topic=name)
            drained(settings)
            assert by_key(consume(settings, name)) == {"a": ["1"], "b": ["1"]}


def test_bad_rows_become_dead_letters_on_request(either: Settings, topic: str) -> None:
    settings = either.model_copy(update={"bad_rows": "dead-letter"})
    insert(settings, topic, [("k", "1"), ("k", TOO_LARGE), ("k", "3")])
    with_unequal_headers(settings, topic, "k", "4")
    env = environment(settings)
    with Harvester(settings):
        drained(settings)
        eventually(lambda: read_status(settings).dead_letters == 2, 30)
        first, second = operate.dead_letters(settings)
        assert "message.max.bytes" in first.reason
        assert "2 header keys" in second.reason
        said = run_outbox("dead-letters", "discard", str(first.id), env=env)
        assert (said.returncode, said.stdout) == (0, "discarded: 1\n")
        for command in ("discard", "retry"):  # It is gone.
            said = run_outbox("dead-letters", command, str(first.id), env=env)
            assert (said.returncode, said.stderr.count(f"there is no dead letter {first.id}")) == (2, 1)
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("UPDATE outbox_dead_letter SET kafka_header_keys = '{}'")
        said = run_outbox("dead-letters", "retry", "--all", env=env)
        assert (said.returncode, said.stdout) == (0, "to be tried again: 1\n")
        eventually(lambda: by_key(consume(settings, topic)) == {"k": ["1", "3", "4"]}, 30)
    assert run_outbox("dead-letters", "list", env=env).stdout == "there are no dead letters\n"


def test_parked_keys_are_listed_and_released_from_the_command_line(settings: Settings, topic: str) -> None:
    env = environment(settings)
    with_unequal_headers(settings, topic, "k", "1")
    with Harvester(settings):
        eventually(lambda: operate.parked_keys(settings), 30)
        said = run_outbox("parked", "list", env=env)
        assert f"topic {topic}, key k: row 1, since " in said.stdout
        assert "2 header keys, but 0 header values" in run_outbox("status", env=env).stdout
        [parked_key] = json.loads(run_outbox("status", "--json", env=env).stdout)["parked"]
        assert (parked_key["topic"], parked_key["key"], parked_key["since"][:2]) == (topic, "k", "20")
        mend(settings, "kafka_header_keys = '{}'")
        assert run_outbox("parked", "release", "--key", "k", env=env).stdout == "released: 1\n"
        drained(settings)


@pytest.mark.parametrize("arguments", [("dead-letters", "retry"), ("dead-letters", "discard", "1", "--all")])
def test_dead_letters_are_never_meant_by_accident(settings: Settings, arguments: tuple[str, ...]) -> None:
    said = run_outbox(*arguments, env=environment(settings))
    assert (said.returncode, said.stderr) == (2, "outbox: name the dead letters by their ids, or give --all\n")
