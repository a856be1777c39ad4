"""Control characters of keys, topics and reasons are shown, and reach neither a log nor a terminal as they are."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import outbox_plugin
from outbox_plugin import cli, harvester, operate
from outbox_plugin.core.bad_rows import BadRow, ParkedKey
from outbox_plugin.core.ordering_key import OrderingKey
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.dagster import health
from outbox_plugin.errors import Refusal
from outbox_plugin.printable import logger_of, printable
from outbox_plugin.relay.events import KeysHeld, RowsParked
from outbox_plugin.settings import Settings
from outbox_plugin.status import command, health_rules, reader

EVIL = "k\x1b[2J\nfake line\r\x9b31m\u202e\x00"
SHOWN = r"k\x1b[2J\nfake line\r\x9b31m\u202e\x00"
SINCE = datetime(2026, 1, 31, tzinfo=UTC)


@given(st.text())
def test_what_is_printed_is_one_printable_line(text: str) -> None:
    assert printable(text).isprintable()
    assert not text.isprintable() or printable(text) == text


def test_escapes_can_be_read() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("Grüße, 世界 𝄞\ud800") == r"Grüße, 世界 𝄞\ud800"


def test_a_log_line_is_one_line_whatever_is_in_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    logger_of("outbox_plugin.tests").warning("%d of %s: %s", 7, EVIL, ValueError(EVIL))
    assert caplog.messages == [f"7 of {SHOWN}: {SHOWN}"]


def test_the_harvester_logs_keys_topics_and_reasons_so(caplog: pytest.LogCaptureFixture) -> None:
    row = OutboxRow(1, 0, f"t{EVIL}", EVIL, None, [], [], 0)
    observer = harvester.Harvester(Settings(dsn="postgresql://db/shop", bootstrap_servers="k:1"))
    observer._observe(RowsParked(0, (BadRow(row, Refusal(EVIL)),)))
    observer._observe(KeysHeld(0, (OrderingKey(f"t{EVIL}", EVIL),), EVIL, 1.0))
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        assert message.isprintable()
        assert message.count(SHOWN) == 3


def test_every_logger_of_the_package_is_made_so() -> None:
    package = Path(outbox_plugin.__file__).parent
    unsafe = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "= logging.getLogger(" in path.read_text() and path.name not in ("printable.py", "kafka_clients.py")
    ]
    assert unsafe == []  # adapters/kafka_clients.py has librdkafka's own logger, which is off.


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> reader.Status:
    monkeypatch.setenv("OUTBOX_DSN", "postgresql://db/shop")
    monkeypatch.setenv("OUTBOX_BOOTSTRAP_SERVERS", "k:1")
    parked_key = ParkedKey(f"t{EVIL}", EVIL, 1, EVIL, SINCE)
    shard = reader.ShardStatus(0, reader.Leader(EVIL, EVIL, 1, "id", "now"), 0, 0.0, 0, 0.1, EVIL)
    found = reader.Status(1, 1.0, (shard,), (EVIL,), 1, (parked_key,), 0)
    letter = operate.DeadLetter(1, f"t{EVIL}", EVIL, EVIL, SINCE)
    monkeypatch.setattr(command, "read_status", lambda *_: found)
    monkeypatch.setattr(operate, "parked_keys", lambda *_: [parked_key])
    monkeypatch.setattr(operate, "dead_letters", lambda *_: [letter])
    return found


@pytest.mark.parametrize("command", [["status"], ["parked", "list"], ["dead-letters", "list"]])
def test_commands_print_no_control_character(said: reader.Status, command: list[str]) -> None:
    output = CliRunner().invoke(cli.outbox, command).output
    assert all(line.isprintable() for line in output.split("\n"))
    assert SHOWN in output


def test_json_stays_exact(said: reader.Status) -> None:
    found = json.loads(CliRunner().invoke(cli.outbox, ["status", "--json"]).output)
    assert found["parked"][0]["key"] == EVIL


def test_checks_explain_themselves_so(said: reader.Status) -> None:
    for judged in (
        health_rules.health(said, health_rules.Limits()),
        health_rules.dead_letters(said, health_rules.Limits()),
    ):
        result = health.result(judged, {})
        assert result.description is not None
        assert result.description.isprintable()
    assert str(health.metadata(said)["trouble"].value).isprintable()
    assert logging.getLogger("outbox_plugin.harvester").filters
