"""Clumsy and hostile input on the command line: one line that says what was wrong, and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = {"OUTBOX_DSN": "postgresql://127.0.0.1:1/x", "OUTBOX_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
NOT_UTF_8 = "\udcff"  # How Python shows an argument's byte 0xff.
FULL_DISK = Path("/dev/full")
UNREADABLE = Path("/proc/self/mem")  # For root, too.


def refused(*arguments: str, **environment: str) -> str:
    """Run a command that must be refused; its one line."""
    done = subprocess.run(
        [sys.executable, "-m", "outbox_plugin", *arguments],
        env={**os.environ, **NOBODY, **environment},
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("outbox: ")
    assert "hunter2" not in line
    return line


@pytest.mark.parametrize(
    "command",
    [
        ("parked", "release", "--topic", NOT_UTF_8),
        ("replay", "--key", NOT_UTF_8),
        ("grants", "--role", "harvester", "--to", NOT_UTF_8),
        ("verify", NOT_UTF_8),
        ("inbox", "list", "--group", NOT_UTF_8),
        (NOT_UTF_8,),
    ],
)
def test_an_argument_that_is_no_text(command: tuple[str, ...]) -> None:
    assert "expected arguments in UTF-8 (given: '\\udcff')" in refused(*command)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("pause", "--shard", "-1"), "-1 is not in the range"),
        (("resume", "--shard", "99999999999999999999"), "99999999999999999999 is not in the range"),
        (("dead-letters", "retry", "1", "99999999999999999999"), "99999999999999999999 is not in the range"),
        (("dead-letters", "discard", "0"), "0 is not in the range"),
        (("inbox", "retry", "99999999999999999999"), "99999999999999999999 is not in the range"),
        (("inbox", "discard", "99999999999999999999"), "99999999999999999999 is not in the range"),
        (("replay", "--since", "2024-02-02", "--until", "2024-02-02"), "expected --since before --until"),
        (("bench", "drain", "--rows", "-1"), "-1 is not in the range"),
        (("bench", "latency", "--rate", "0"), "0.0 is not in the range"),
        (("bench", "latency", "--seconds", "nan"), "--seconds': expected a finite number (given: nan)"),
        (
            ("consumers", "--coordination-topic", "bad/name", "list"),
            "coordination topic: expected a name of 1 to 243 letters, digits, dots, dashes and underscores (given: ",
        ),
        (("consumers", "pause", ""), "group_id: is empty"),
        (("consumers", "pause", " "), "group_id: expected a name that begins with no white space (given: ' ')"),
        (("verify", "t" * 50_000), "expected a topic's name of 1 to 249 letters, digits, dots, _ and - (given: 'ttt"),
        (("bench", "tick", "--ticks", "1"), "1 is not in the range x>=2"),
        (("consumers", "set-position", "billing", "", "0=42"), "topic: is empty"),
        (("grants", "--to", "x"), "Missing option '--role'. Choose from: emitter, harvester, inbox,"),
        (("grants", "--role", "harvester", "--to", ""), "expected the name of a Postgres role, of 1 to 63 bytes"),
        (("grants", "--role", "emitter", "--to", "ö" * 32), "expected the name of a Postgres role, of 1 to 63 bytes"),
        (("grants", "--role", "inbox", "--kafka", "--to", "User:"), "expected a Kafka principal in the form User:name"),
        (
            ("grants", "--role", "harvester", "--kafka", "--to", "User:x", "--topic", "a b"),
            "--topic: expected a name of letters, digits, dots, dashes and underscores, or a prefix that ends with *",
        ),
        (("grants", "--role", "harvester", "--kafka", "--to", "User:x", "--topic", ""), "--topic: expected a name"),
    ],
)
def test_an_absurd_argument(command: tuple[str, ...], said: str) -> None:
    assert said in refused(*command)


@pytest.mark.parametrize(
    ("setting", "given", "said"),
    [
        (
            "OUTBOX_KAFKA",
            '{"sasl.password": "hunter2\\ud800"}',
            "'sasl.password' and its value: expected texts without",
        ),
        (
            "OUTBOX_KAFKA",
            '{"sasl.password": "hunter2\\u0000"}',
            "'sasl.password' and its value: expected texts without",
        ),
        ("OUTBOX_KAFKA", "[" * 100_000, "expected JSON (given: lists or objects, nested too deep)"),
        ("OUTBOX_OUTBOXES", "[" * 100_000, "expected JSON (given: lists or objects, nested too deep)"),
    ],
)
def test_a_setting_that_no_client_takes(setting: str, given: str, said: str) -> None:
    assert said in refused("status", **{setting: given})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"OUTBOX_GROUP=\xff", "outbox: .env: expected a file in UTF-8"),
        (None, "outbox: .env: cannot be read: Input/output error"),
    ],
)
def test_a_file_of_settings_that_cannot_be_read(content: bytes | None, said: str) -> None:
    """Neither is blamed on the output, which has the same kinds of errors."""
    if content is not None:
        Path(".env").write_bytes(content)
    elif UNREADABLE.exists():
        Path(".env").symlink_to(UNREADABLE)
    else:
        pytest.skip(f"this system has no {UNREADABLE}")
    assert refused("parked", "list") == said


def test_kafkas_rights_are_printed_without_a_postgres() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outbox_plugin", *["grants", "--role", "monitor", "--kafka", "--to", "User:x"]],
        env={name: value for name, value in {**os.environ, **NOBODY}.items() if name != "OUTBOX_DSN"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--topic outbox-leader" in done.stdout


@pytest.mark.skipif(not FULL_DISK.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", ["--help", "--version", "grants --role emitter --kafka --to User:x"])
def test_an_output_that_cannot_be_written(command: str) -> None:
    with FULL_DISK.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "outbox_plugin", *command.split()],
            env={**os.environ, **NOBODY},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    reason = "No space left on device; if the command changes something, that may be done"
    assert (done.returncode, done.stderr) == (2, f"outbox: the output cannot be written: {reason}\n")


def test_an_output_whose_encoding_lacks_a_character() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outbox_plugin", *["grants", "--role", "monitor", "--kafka", "--to", "User:日本"]],
        env={**os.environ, **NOBODY, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "outbox: the output cannot be written in latin-1: set PYTHONIOENCODING=utf-8\n"
