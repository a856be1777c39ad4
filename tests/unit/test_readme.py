"""What the README and the reference say is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from outbox_plugin.settings import Settings
from tests.documents import CHECKOUT, DOCS, PAGES, blocks, name_of

README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
SETTINGS = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
COMMANDS = (DOCS / "reference" / "command-line.md").read_text(encoding="utf-8")


def test_the_readme_is_read_in_two_minutes() -> None:
    assert README.count("\n") <= 130


def test_the_declaration_loads_as_a_code_location(tmp_path: Path) -> None:
    """The block that a user pastes into a project of theirs, word for word."""
    page = blocks("how-to/declare-in-dagster.md", "python")
    [declaration] = [block.text for block in page if "Definitions(" in block.text and "OutboxWrite" in block.text]
    assert declaration.count("\n") < 40
    (tmp_path / "mine.py").write_text(declaration, encoding="utf-8")
    command = [sys.executable, "-m", "dagster", "definitions", "validate", "-f", "mine.py"]
    env = {"OUTBOX_DSN": "postgresql://db/shop", "OUTBOX_BOOTSTRAP_SERVERS": "kafka:9092", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_make_is_told_can_be_made(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    told = re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(told) <= set(targets)


def test_the_gate_runs_what_the_readme_says() -> None:
    gate = re.findall(r"^make ([a-z-]+)", (CHECKOUT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(gate) == sorted(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))


def test_every_setting_is_listed_with_its_default() -> None:
    for name, field in Settings.model_fields.items():
        [row] = re.findall(rf"^\| `OUTBOX_{name.upper()}` \|(.*?)\|", SETTINGS, re.MULTILINE)
        default = "" if field.is_required() else f"`{field.default}`"
        assert row.strip() == default, name


def test_every_command_is_listed() -> None:
    said = subprocess.run([sys.executable, "-m", "outbox_plugin", "-h"], capture_output=True, text=True, check=True)
    commands = re.findall(r"^  ([\w-]+)  ", said.stdout.split("Commands:")[1], re.MULTILINE)
    assert commands
    assert [name for name in commands if f"| `outbox {name}" not in COMMANDS] == []
