"""`outbox status` as a check, and as what a terminal keeps showing."""

from __future__ import annotations

import io
import json
import signal
import threading
import time

import pytest
from click.testing import CliRunner
from rich.console import Console

from outbox_plugin import Settings
from outbox_plugin.cli import outbox
from outbox_plugin.errors import InvalidSetting
from outbox_plugin.status import command
from outbox_plugin.status.command import screen
from outbox_plugin.status.health_rules import Limits
from outbox_plugin.status.reader import Leader, ShardStatus, Status
from tests.support import PATIENCE

LEADER = Leader("h-1", "host-1", 17, "term-1", "2026-01-01T00:00:00+00:00")
LED = ShardStatus(0, LEADER, 3, 1200.0, 5_000, 0.1, None)
ALONE = ShardStatus(1, None, 4, 0.0, 0, None, None)
WELL = Status(3, 1.0, (LED,), ())


@pytest.fixture(autouse=True)
def _settings_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_DSN", "postgresql://nowhere/db")
    monkeypatch.setenv("OUTBOX_BOOTSTRAP_SERVERS", "nowhere:1")


def asked(monkeypatch: pytest.MonkeyPatch, found: Status, *options: str) -> tuple[int, str]:
    monkeypatch.setattr(command, "read_status", lambda _: found)
    done = CliRunner().invoke(outbox, ["status", *options])
    return done.exit_code, done.output


def test_the_check_passes_where_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, WELL, "--check")[0] == 0


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Status(3, 1.0, (LED, ALONE), ()), "shard 1 has no leader: start `outbox harvest`"),
        (Status(3, 31.0, (LED,), ()), "the oldest event has waited for 31 s"),
    ],
)
def test_the_check_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch, found: Status, why: str) -> None:
    code, said = asked(monkeypatch, found, "--check")
    assert (code, why in said) == (1, True)
    assert asked(monkeypatch, found)[0] == 0  # Without the option it only tells.


def test_the_check_names_the_table_where_there_are_several_alone() -> None:
    alone, late = Status(3, 1.0, (ALONE,), ()), Status(3, 31.0, (LED,), ())
    [line] = command._failures({"outbox": alone}, Limits())
    assert line.startswith("shard 1 has no leader: ")  # The command writes `outbox: ` before it.
    assert [
        line.partition(": ")[0] for line in command._failures({"outbox": alone, "b": WELL, "c": late}, Limits())
    ] == [
        "table outbox",
        "table c",
    ]


def test_the_check_takes_another_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Status(3, 31.0, (LED,), ())
    assert asked(monkeypatch, late, "--check", "--lag-seconds", "60")[0] == 0


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "-1", "soon"])
def test_a_lag_that_is_no_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    """With nan, the check would pass whatever waits."""
    code, said = asked(monkeypatch, Status(3, 9e9, (LED,), ()), "--check", f"--lag-seconds={seconds}")
    assert (code, "--lag-seconds" in said) == (2, True)


def test_tables_of_two_databases_that_are_called_alike_are_both_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    outboxes = [{"group": "a", "dsn": "postgresql://a/db"}, {"group": "b", "dsn": "postgresql://b/db"}]
    monkeypatch.setenv("OUTBOX_OUTBOXES", json.dumps([*outboxes, {"group": "c", "table": "other"}]))
    found = {"a": Status(3, 1.0, (ALONE,), ()), "b": WELL, "c": WELL}
    monkeypatch.setattr(command, "read_status", lambda settings: found[settings.group])
    done = CliRunner().invoke(outbox, ["status", "--check"])
    assert done.exit_code == 1
    assert "outbox: table outbox of a: shard 1 has no leader" in done.output
    shown = json.loads(CliRunner().invoke(outbox, ["status", "--json"]).output)
    assert list(shown) == ["outbox of a", "outbox of b", "other"]


def test_outboxes_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each server that is away would make the command some seconds longer."""
    monkeypatch.setenv("OUTBOX_OUTBOXES", json.dumps([{"group": f"g{number}"} for number in range(5)]))
    all_asked = threading.Barrier(5)

    def read(_: Settings) -> Status:
        all_asked.wait(60 * PATIENCE)
        return WELL

    monkeypatch.setattr(command, "read_status", read)
    assert CliRunner().invoke(outbox, ["status", "--check"]).exit_code == 0


@pytest.mark.parametrize("options", [[], ["--json"], ["--check"]])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OUTBOX_KAFKA", '{"sasl.pasword": "hunter2"}', 'OUTBOX_KAFKA: No such configuration property: "sasl.pasword"'),
        ("OUTBOX_KAFKA", '{"sasl.password": "hunter2",}', "OUTBOX_KAFKA: expected JSON"),
        (
            "OUTBOX_KAFKA_TOKEN_PROVIDER",
            "no_such_module:token",
            "OUTBOX_KAFKA_TOKEN_PROVIDER: no_such_module:",
        ),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, options: list[str], name: str, value: str, said: str
) -> None:
    """No server is to blame for it."""
    if name != "OUTBOX_KAFKA":
        monkeypatch.setenv("OUTBOX_KAFKA", '{"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}')
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "read_status", lambda _: pytest.fail("nothing is asked"))
    refused = CliRunner().invoke(outbox, ["status", *options]).exception
    assert isinstance(refused, InvalidSetting)
    assert str(refused).startswith(said)
    assert "hunter2" not in str(refused)


def test_an_estimate_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _, said = asked(monkeypatch, Status(4_000_000, 1.0, (LED,), (), backlog_is_estimated=True))
    assert "backlog: about 4000000 rows" in said


@pytest.mark.parametrize("options", [["--watch"], ["--watch", "--json"], ["--watch", "--check"]])
def test_watching_without_a_terminal_is_refused(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    monkeypatch.setattr(command, "read_status", lambda _: pytest.fail("nothing is asked"))
    done = CliRunner().invoke(outbox, ["status", *options])
    assert done.exit_code != 0
    assert "--watch" in str(done.exception)


def test_a_terminal_shows_each_shard_and_what_is_wrong() -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    found = {"outbox": Status(7, 1.0, (LED, ALONE), ("Kafka: does not answer",))}
    console.print(screen(found, time.gmtime(0)))
    shown = console.export_text()
    for part in ("00:00:00", "backlog: 7 rows", "h-1 on host-1, pid 17", "1,200", "none is heard", "Kafka: does not"):
        assert part in shown


def test_the_cursor_is_shown_again_if_a_signal_comes_right_after_it_was_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    class Terminal(Console):
        def __init__(self) -> None:
            super().__init__(file=io.StringIO(), force_terminal=True)

        def show_cursor(self, show: bool = True) -> bool:
            shown.append(show)
            if not show:
                signal.raise_signal(signal.SIGTERM)
            return super().show_cursor(show)

    monkeypatch.setattr(command, "Console", Terminal)
    with pytest.raises(SystemExit) as ended:
        command._keep_showing(dict)
    assert ended.value.code == 128 + signal.SIGTERM
    assert shown == [False, True]
