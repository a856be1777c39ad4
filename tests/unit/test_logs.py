"""A log's line is one line, in text and in JSON, whatever is logged; and a log that cannot be written ends nothing."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin import Settings, harvester, logs
from outbox_plugin.core.bad_rows import BadRow
from outbox_plugin.core.ordering_key import OrderingKey
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.errors import InvalidSetting, Refusal
from outbox_plugin.log_tenant import of_same_tenant, of_tenant
from outbox_plugin.observe.event_log import EventLog
from outbox_plugin.printable import logger_of
from outbox_plugin.relay.events import KeysHeld, RowsParked, TermBegan, TermFinished
from outbox_plugin.settings import LogSettings
from tests.processes import ASKS_BROKERS_BRIEFLY

EVIL = "k\x1b[2J\nfake line\r\x9b31m\u202e\x00\ud800"
LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) .*"
NOT_THERE = {"OUTBOX_DSN": "postgresql://127.0.0.1:1/x", "OUTBOX_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
HARVEST = [sys.executable, "-c", ASKS_BROKERS_BRIEFLY + "import outbox_plugin.__main__", "harvest"]


class Stubborn:
    """A thing that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def record(message: object, *args: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("tests").makeRecord("tests", logging.INFO, __file__, 1, message, args, None, extra=extra)


def raised(error: Exception) -> Any:
    try:
        raise error
    except Exception:
        return sys.exc_info()


@given(st.text(), st.one_of(st.text(), st.binary(), st.integers(), st.none()))
def test_a_line_is_one_line_in_both_forms(text: str, key: object) -> None:
    noted = record("%s of " + text.replace("%", "%%"), text, key=key, topic=text)
    assert logs.TextFormatter().format(noted).isprintable()
    line = logs.JsonFormatter().format(noted)
    assert line.isascii()
    assert line.isprintable()
    found = json.loads(line)
    found["message"].encode()
    found["topic"].encode()  # No surrogate on its own: not every reader of JSON takes one.


def test_json_has_the_standard_fields() -> None:
    noted = record("shard %d: %s", 3, "leads", shard=3, leader="a-b", term=7, topic="t", key=b"\xffk", other="unseen")
    noted.created = 1_800_000_000.25
    assert json.loads(logs.JsonFormatter().format(noted)) == {
        "timestamp": "2027-01-15T08:00:00.250Z",
        "level": "INFO",
        "logger": "tests",
        "message": "shard 3: leads",
        "shard": 3,
        "leader": "a-b",
        "term": 7,
        "topic": "t",
        "key": r"\xffk",
    }


def test_an_exception_is_one_field_or_stays_on_the_line() -> None:
    noted = record("it fails")
    noted.exc_info = raised(ValueError(EVIL))
    line = logs.TextFormatter().format(noted)
    assert line.isprintable()
    assert r"it fails\nTraceback" in line
    found = json.loads(logs.JsonFormatter().format(noted))
    assert found["message"] == "it fails"
    assert found["exception"].startswith("Traceback")
    assert "fake line" in found["exception"]


@pytest.mark.parametrize("formatter", [logs.TextFormatter(), logs.JsonFormatter()])
@pytest.mark.parametrize("noted", [record("%d", "no number"), record("%s", Stubborn()), record(Stubborn())])
def test_what_cannot_be_shown_is_said_to_be_so(formatter: logging.Formatter, noted: logging.LogRecord) -> None:
    assert "test_logs.py:1 cannot be shown" in formatter.format(noted)


def test_an_extra_that_cannot_be_shown() -> None:
    found = json.loads(logs.JsonFormatter().format(record("here", key=Stubborn())))
    assert found["key"] == "cannot be shown: RuntimeError"


def test_a_harvesters_events_name_what_they_are_about(caplog: pytest.LogCaptureFixture) -> None:
    """And no value of a row, at any level that is shown by default."""
    caplog.set_level(logging.INFO)
    observer = harvester.Harvester(Settings(dsn="postgresql://db/shop", bootstrap_servers="k:1"))
    row = OutboxRow(1, 0, "orders", EVIL, "the value", ["name"], ["the header"], 0)
    for event in (
        TermBegan(2, "leader", 5, term=9),
        RowsParked(2, (BadRow(row, Refusal("too large")),)),
        KeysHeld(2, (OrderingKey("orders", None),), "away", 1.0),
        TermFinished(2, "leader", "fenced", "Fenced"),
        TermFinished(2, "leader", None, None),
        TermFinished(2, "leader", "given to another", None, is_planned=True),
    ):
        observer._observe(event)
    lines = [logs.JsonFormatter().format(each) for each in caplog.records]
    named = [{name: json.loads(line).get(name) for name in logs.EXTRAS} for line in lines]
    nothing = dict.fromkeys(logs.EXTRAS)
    assert named == [
        {**nothing, "shard": 2, "leader": "leader", "term": 9},
        {**nothing, "shard": 2, "topic": "orders", "key": EVIL.replace("\ud800", r"\ud800")},
        {**nothing, "shard": 2, "topic": "orders"},
        {**nothing, "shard": 2, "leader": "leader"},
        {**nothing, "shard": 2, "leader": "leader"},
        {**nothing, "shard": 2, "leader": "leader"},
    ]
    assert [each.levelname for each in caplog.records[3:]] == ["WARNING", "INFO", "INFO"]
    assert not [line for line in lines if "the value" in line or "the header" in line]


def test_takeovers_that_fail_for_the_same_reason_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """While a server is away, they fail every few seconds. No such harvester has led."""
    caplog.set_level(logging.INFO)
    time = [1_000.0]
    log = EventLog(lambda: time[0])

    def fail(shard: int, reason: str | None, after: float) -> list[str]:
        time[0] += after
        caplog.clear()
        log.write(TermFinished(shard, "leader", reason, None, has_led=False))
        return caplog.messages

    assert fail(0, "away", 0.0) == ["shard 0: the takeover failed: away"]
    assert fail(0, "away", 30.0) == []
    assert fail(0, "stuck", 1.0) == ["shard 0: the takeover failed: stuck"]
    assert fail(1, "away", 0.0) == ["shard 1: the takeover failed: away"]
    assert fail(0, "away", 28.0) == []
    assert fail(0, "away", 1.0) == ["shard 0: the takeover failed: away"]
    log.write(TermBegan(0, "leader", 0))
    assert fail(0, "away", 1.0) == ["shard 0: the takeover failed: away"]
    assert fail(0, None, 0.0) == ["shard 0: stopped before it has taken over"]


def test_a_leader_whose_terms_end_for_the_same_reason_says_so_each_time(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(lambda: 0.0)
    for _ in range(2):
        log.write(TermFinished(0, "leader", "away", "LogUnavailable"))
    assert caplog.messages == ["shard 0: leading no more: away"] * 2


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [("log_format", "xml", "'text' or 'json'"), ("log_level", "loud", "'DEBUG', 'INFO', 'WARNING' or 'ERROR'")],
)
def test_a_setting_that_is_wrong(name: str, given: str, said: str) -> None:
    with pytest.raises(InvalidSetting, match=f"OUTBOX_{name.upper()}: .*{said}.*given: '{given}'"):
        LogSettings(**{name: given})
    with pytest.raises(InvalidSetting, match=f"OUTBOX_{name.upper()}: "):
        Settings(**{name: given}, dsn="postgresql://db/shop", bootstrap_servers="k:1")


def test_an_outbox_of_several_has_no_log_of_its_own() -> None:
    with pytest.raises(InvalidSetting, match="'log_format' is not a setting"):
        Settings(dsn="postgresql://db/shop", bootstrap_servers="k:1", outboxes=[{"log_format": "json"}])


def run(script: str, *arguments: str, **streams: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", script, *arguments], check=False, **streams)


def ended(env: dict[str, str], **streams: Any) -> subprocess.CompletedProcess[bytes]:
    """`outbox harvest`, whose servers are not there."""
    return subprocess.run(HARVEST, env={**os.environ, **NOT_THERE, **env}, check=False, **streams)


@pytest.mark.parametrize("wrong", [{"OUTBOX_LOG_FORMAT": "xml"}, {"OUTBOX_LOG_LEVEL": "a\x1b[2Jb"}])
def test_the_command_refuses_a_wrong_setting_in_one_line(wrong: dict[str, str]) -> None:
    done = ended(wrong, stderr=subprocess.PIPE)
    assert done.returncode == 2
    [line] = done.stderr.decode().splitlines()
    assert line.isprintable()
    assert line.startswith(f"outbox: {next(iter(wrong))}: ")


def test_in_json_the_reason_for_the_end_is_an_event_too() -> None:
    done = ended({"OUTBOX_LOG_FORMAT": "json"}, stderr=subprocess.PIPE)
    assert done.returncode == 2
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert lines[-1]["level"] == "ERROR"
    assert "127.0.0.1:1" in lines[-1]["message"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_standard_error_that_takes_nothing_changes_no_exit_code(form: str) -> None:
    with Path("/dev/full").open("wb") as full:
        assert ended({"OUTBOX_LOG_FORMAT": form}, stderr=full).returncode == 2
    env = {**os.environ, **NOT_THERE, "OUTBOX_LOG_FORMAT": form}
    assert subprocess.run(["/bin/sh", "-c", 'exec "$0" "$@" 2>&-', *HARVEST], env=env, check=False).returncode == 2


LOGGING = """
import logging, os, sys, threading
from pathlib import Path
from outbox_plugin import logs
from outbox_plugin.settings import LogSettings
"""


def test_in_json_errors_that_nobody_catches_and_warnings_are_events(tmp_path: Path) -> None:
    script = LOGGING + (
        "logs.configure(LogSettings(log_format='json'), logs.to_stderr(), 'INFO')\n"
        "import warnings\n"
        "warnings.warn('careful')\n"
        "thread = threading.Thread(target=lambda: 1 / 0)\n"
        "thread.start(); thread.join()\n"
        "raise KeyError('in\\nthe end')\n"
    )
    done = run(script, stderr=subprocess.PIPE)
    assert done.returncode == 1
    warned, thread, end = [json.loads(line) for line in done.stderr.splitlines()]
    assert "careful" in warned["message"]
    assert "ZeroDivisionError" in thread["exception"]
    assert "KeyError" in end["exception"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_file_stays_bounded_and_takes_what_is_written_to_standard_error(tmp_path: Path, form: str) -> None:
    """Raw output, as of an interpreter that dies, goes to the newest file, and not to one that was renamed."""
    path = tmp_path / "a.log"
    script = LOGGING + (
        "logs.configure(LogSettings(log_format=sys.argv[2]), logs.to_file(Path(sys.argv[1]), 5_000), 'INFO')\n"
        "for number in range(500):\n"
        "    logging.info('event %d', number)\n"
        "    os.write(2, b'raw %d\\n' % number)\n"
    )
    assert run(script, str(path), form).returncode == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.log", "a.log.1"]
    both = (tmp_path / "a.log.1").read_text() + path.read_text()
    assert all(each.stat().st_size < 5_100 for each in tmp_path.iterdir())
    raw = [int(line.split()[1]) for line in both.splitlines() if line.startswith("raw")]
    events = [int(number) for number in re.findall(r"event (\d+)", both)]
    assert raw == list(range(raw[0], 500))
    assert events == list(range(events[0], 500))
    assert path.read_text().endswith("raw 499\n")


def test_a_log_that_cannot_be_rotated_loses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    (tmp_path / "a.log.1").mkdir()  # In the place of the older file.
    (tmp_path / "a.log.1" / "kept").touch()
    script = LOGGING + (
        "logs.ROTATE_AGAIN_SECONDS = float(sys.argv[2])\n"
        "logs.configure(LogSettings(), logs.to_file(Path(sys.argv[1]), 1_000), 'INFO')\n"
        "for number in range(100):\n"
        "    logging.info('event %d', number)\n"
    )
    for again, first in (("0", 0), ("60", 100)):
        assert run(script, str(path), again).returncode == 0
        assert re.findall(r"event (\d+)", path.read_text())[first:] == [str(number) for number in range(100)]


def test_a_thread_that_ends_itself_is_no_error() -> None:
    script = LOGGING + (
        "import threading\n"
        "logs.configure(LogSettings(log_format='json'), logs.to_stderr(), 'INFO')\n"
        "thread = threading.Thread(target=sys.exit)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    done = run(script, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: it is full, also when the file is closed; then it is not."""
    script = LOGGING + (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "path = Path(sys.argv[1])\n"
        "handler = logs.to_file(path, 10_000)\n"
        "logs.configure(LogSettings(), handler, 'INFO')\n"
        "logging.info('before')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, resource.RLIM_INFINITY))\n"
        "for number in range(300):\n"
        "    logging.info('lost %d', number)\n"
        "try:\n"
        "    handler.stream.close()\n"
        "except OSError:\n"
        "    pass\n"
        "logging.info('lost too')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "logging.info('after')\n"
        "logging.info('and after')\n"
    )
    path = tmp_path / "a.log"
    done = run(script, str(path), stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "before" in path.read_text()
    assert "INFO and after\n" in path.read_text()


def test_what_spark_is_told_is_not_logged_at_any_level() -> None:
    """It holds passwords, in clear."""
    script = """
import logging
from outbox_plugin import logs
from outbox_plugin.settings import LogSettings
logs.configure(LogSettings(log_level="DEBUG"), logging.StreamHandler(), "INFO")
logging.getLogger("py4j.clientserver").debug("password=hunter2")
logging.getLogger("outbox_plugin").debug("seen")
"""
    said = run(script, stderr=subprocess.PIPE).stderr
    assert b"seen" in said
    assert b"hunter2" not in said


def test_the_text_form_is_what_it_was() -> None:
    noted = record("shard %d: handed over", 0)
    line = logs.TextFormatter().format(noted)
    assert re.fullmatch(LINE, line)
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(noted.created))
    assert line == f"{moment},{int(noted.msecs):03d} INFO shard 0: handed over"


@pytest.mark.parametrize(
    ("message", "args", "text"), [("shard %d: 5 %%", (0,), "shard 0: 5 %"), ("all 100 % of it", (), "all 100 % of it")]
)
def test_a_tenants_lines_begin_with_its_schema(
    message: str, args: tuple[int, ...], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On the thread that is named, and on those that it starts; not on others, nor afterwards."""
    tenants_log = logger_of("tests.tenants")

    def log() -> None:
        tenants_log.error(message, *args)

    def log_there() -> None:
        started = [threading.Thread(target=target) for target in (of_same_tenant(log), log)]
        for thread in started:
            thread.start()
            thread.join()

    of_tenant("tenant_1%s\n", log_there)()
    log()
    assert [each.getMessage() for each in caplog.records] == [rf"schema tenant_1%s\n: {text}", text, text]
    assert [getattr(each, "schema", None) for each in caplog.records] == ["tenant_1%s\n", None, None]
