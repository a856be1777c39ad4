"""`outbox verify` without Spark: what it finds is what Spark finds (see `test_spark_verify`)."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

import psycopg
import pytest
from confluent_kafka import Producer
from pydantic import SecretStr

from outbox_plugin import Settings
from outbox_plugin.errors import ServerRefused
from outbox_plugin.verification import topic_ends
from outbox_plugin.verification.topic_reader import verify_topics
from tests.harvesting import create_topic, environment, run_outbox
from tests.records_to_verify import ALL, EVENTS, KEYS, Planted, plant, plant_moved_key
from tests.support import PATIENCE, eventually
from tests.terminals import HIDDEN_CURSOR, SHOWN_CURSOR, a_terminal, on_terminal

pytestmark = pytest.mark.integration


def test_all_is_well(settings: Settings, topic: str) -> None:
    """Records of an aborted transaction are not there for a `read_committed` consumer."""
    plant(settings, topic, [*ALL, *(Planted(place, aborted=True) for place in (1, 5, 7))])
    passed: list[int] = []
    verdict = verify_topics(settings, [topic, topic], advance=passed.append)
    assert (verdict.records, verdict.complete, verdict.missing) == (EVENTS, True, 0)
    assert (verdict.unnamed, verdict.unplaced) == (0, 0)
    assert sum(passed) >= EVENTS


@pytest.mark.parametrize("named", [True, False])
def test_one_duplicated_record_is_found(settings: Settings, topic: str, named: bool) -> None:
    plant(settings, topic, [*(Planted(each.place, named) for each in ALL), Planted(7, named)])
    verdict = verify_topics(settings, [topic])
    assert (verdict.records, verdict.duplicates, verdict.order_violations) == (EVENTS + 1, 1, 0)
    assert (verdict.missing, verdict.in_order) == (0, False)


@pytest.mark.parametrize("named", [True, False])
def test_a_replay_is_no_duplicate_and_no_disorder(settings: Settings, topic: str, named: bool) -> None:
    """And an event that only a replay has brought is not missing."""
    first = [Planted(each.place, named) for each in ALL if each.place != EVENTS]
    plant(settings, topic, [*first, *(Planted(place, named, replayed=True) for place in (7, 7, 9, EVENTS))])
    verdict = verify_topics(settings, [topic])
    assert (verdict.records, verdict.replayed, verdict.complete) == (EVENTS + 3, 4, True)
    assert (verdict.unnamed, verdict.unplaced, verdict.missing) == (0, 0, 0)


def test_one_swapped_pair_is_found(settings: Settings, topic: str) -> None:
    swapped = [*ALL]
    swapped[100], swapped[100 + KEYS] = swapped[100 + KEYS], swapped[100]
    plant(settings, topic, swapped)
    verdict = verify_topics(settings, [topic])
    assert (verdict.duplicates, verdict.order_violations, verdict.missing) == (0, 1, 0)


@pytest.mark.parametrize("lost", [1, 300, EVENTS])
def test_one_lost_record_is_found(settings: Settings, topic: str, lost: int) -> None:
    """Also the last one, which leaves no gap: the database knows how many there were."""
    plant(settings, topic, [each for each in ALL if each.place != lost])
    verdict = verify_topics(settings, [topic])
    assert (verdict.records, verdict.missing, verdict.complete) == (EVENTS - 1, 1, False)
    assert verdict.example_missing == [f"j {lost}"]


def test_a_job_that_emitted_to_two_topics_is_whole_with_both(settings: Settings, topic: str, group: str) -> None:
    other = create_topic(settings, f"{group}-other")
    plant(settings, topic, ALL[::2])
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("DELETE FROM outbox_job")
    plant(settings, other, ALL[1::2])
    assert verify_topics(settings, [topic, other], job="j").complete
    assert verify_topics(settings, [topic], job="j").missing == EVENTS // 2
    assert verify_topics(settings, [topic], job="another").records == 0


def test_a_topic_that_is_not_there(settings: Settings) -> None:
    with pytest.raises(ServerRefused, match="the topic nowhere cannot be read"):
        verify_topics(settings, ["nowhere"])


def test_what_others_write_meanwhile_is_not_waited_for(settings: Settings, topic: str) -> None:
    """The end is the one that a partition has when it is begun; a writer may be faster than the reader for ever."""
    plant(settings, topic, ALL)
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})

    def write_more(_: int) -> None:
        for number in range(100):
            producer.produce(topic, b"v", f"key-{number}", partition=0)
        producer.flush(30)

    verdict = verify_topics(settings, [topic], advance=write_more)
    assert (verdict.records, verdict.complete) == (EVENTS, True)


def test_what_has_just_been_committed_is_there(settings: Settings, topic: str) -> None:
    """The answer to a commit comes before the partitions show its records."""
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers, "transactional.id": f"{topic}-just-now"})
    producer.init_transactions(30)
    for number in range(1, 11):
        producer.begin_transaction()
        for partition in range(3):
            producer.produce(topic, b"v", f"key-{partition}", partition=partition)
        producer.commit_transaction(30)
        assert verify_topics(settings, [topic]).records == 3 * number


def test_an_open_transaction_holds_no_committed_records(
    settings: Settings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_ends, "COMMIT_SECONDS", 0.5)
    plant(settings, topic, ALL)
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers, "transactional.id": f"{topic}-open"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"v", b"key-0", partition=0)
    assert producer.flush(30) == 0
    verdict = verify_topics(settings, [topic])
    assert (verdict.records, verdict.complete) == (EVENTS, True)
    producer.abort_transaction(30)


def test_a_key_that_moved_to_another_partition_is_judged_within_each(settings: Settings, topic: str) -> None:
    plant_moved_key(settings, topic)
    verdict = verify_topics(settings, [topic])
    assert (verdict.records, verdict.order_violations) == (4, 1)


@pytest.mark.parametrize("asked", [["--job", "typo"], []])
def test_the_command_does_not_call_nothing_right(settings: Settings, topic: str, asked: list[str]) -> None:
    if asked:
        plant(settings, topic, ALL)
    done = run_outbox("verify", topic, "--json", *asked, env=environment(settings))
    assert done.returncode == 1
    assert (json.loads(done.stdout)["records"], json.loads(done.stdout)["complete"]) == (0, False)
    assert done.stderr == f"outbox: nothing was verified: {topic} holds no records" + (
        " of the job 'typo'\n" if asked else "\n"
    )


def test_hostile_records_are_only_counted(settings: Settings, topic: str) -> None:
    """Places of 18 digits take no memory of that size; what is no place, no name or no text is not believed."""
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
    for sequence in (b"9" * 18, b"-1", b"0", b"\xff", b"9" * 19, b"", b"1e9"):
        producer.produce(topic, b"v", b"\xff\x00", headers=[("outbox-job", b"\xff"), ("outbox-sequence", sequence)])
    producer.produce(topic, None, None, headers=[("idempotency-key", b"")])
    assert producer.flush(30) == 0
    verdict = verify_topics(settings, [topic])
    assert (verdict.records, verdict.duplicates) == (8, 0)
    assert verdict.missing == 10**18 - 1 - 1
    assert verdict.example_missing == ["\\xff 1", "\\xff 2", "\\xff 3"]


def test_the_command_says_what_is_wrong_and_ends_with_1(settings: Settings, topic: str) -> None:
    plant(settings, topic, ALL[1:])
    done = run_outbox("verify", topic, "--json", env=environment(settings))
    said = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert (said["records"], said["missing"], said["complete"]) == (EVENTS - 1, 1, False)


def test_the_command_shows_how_far_it_is_where_somebody_looks(settings: Settings, topic: str) -> None:
    plant(settings, topic, ALL)
    command = [sys.executable, "-m", "outbox_plugin", "verify", topic]
    env = {**environment(settings), "TERM": "xterm", "COLUMNS": "80"}
    with a_terminal() as (terminal, shown):
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=terminal, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == f"records: {EVENTS}"
    assert b"records" in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_cursor_is_shown_again_however_the_command_ends(
    settings: Settings, topic: str, number: signal.Signals
) -> None:
    plant(settings, topic, ALL)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # It is asked how many events the job emitted.
        nowhere = settings.model_copy(update={"dsn": SecretStr(f"postgresql://127.0.0.1:{silent.getsockname()[1]}/x")})
        with on_terminal(nowhere, number, "verify", topic) as (process, shown):
            eventually(lambda: HIDDEN_CURSOR in shown, 60)
            process.send_signal(number)
            assert process.wait(60 * PATIENCE) == 128 + number
            eventually(lambda: shown.rfind(SHOWN_CURSOR) > shown.rindex(HIDDEN_CURSOR), 10)


def test_the_command_says_what_it_does_not_judge_without_spark(settings: Settings, topic: str) -> None:
    plant(settings, topic, ALL)
    _judges_without_spark(settings, topic, "sys.modules['pyspark'] = None\n")


def test_the_command_needs_no_java_where_it_can_do_without_spark(settings: Settings, topic: str) -> None:
    plant(settings, topic, ALL)
    _judges_without_spark(
        settings,
        topic,
        "from outbox_plugin.embedded import java, server\n"
        "def no_java(): raise server.ServerFailed('no Java 17 or newer')\n"
        "java.spark_java_home = no_java\n",
    )


def _judges_without_spark(settings: Settings, topic: str, without: str) -> None:
    script = (
        f"import sys\n{without}"
        "from outbox_plugin import cli\n"
        "from outbox_plugin.verification import command\n"
        "command.SPARK_RECORDS, command.MAX_RECORDS = 10, int(sys.argv.pop())\n"
        "cli.main()\n"
    )
    command = [sys.executable, "-c", script, "verify", topic]
    for most, code in ((EVENTS - 1, 2), (10 * EVENTS, 0)):
        done = subprocess.run(
            [*command, str(most)], env=environment(settings), capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        assert ("install outbox-plugin[spark]" in done.stderr) == (code == 2)
        assert done.stderr.count("\n") == (code == 2)


def test_the_command_ends_with_2_where_a_server_is_away(settings: Settings, topic: str) -> None:
    plant(settings, topic, ALL)
    for away in ({"OUTBOX_BOOTSTRAP_SERVERS": "127.0.0.1:1"}, {"OUTBOX_DSN": "postgresql://127.0.0.1:1/x"}):
        done = run_outbox("verify", topic, env={**environment(settings), **away})
        assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
