"""What the README says is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from outbox_plugin.settings import Settings

CHECKOUT = Path(__file__).resolve().parents[2]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_declaration_loads_as_a_code_location(tmp_path: Path) -> None:
    """The block that a user pastes into a project of theirs, word for word."""
    [declaration] = [block for block in PYTHON if "Definitions(" in block]
    assert declaration.count("\n") < 40
    (tmp_path / "mine.py").write_text(declaration, encoding="utf-8")
    command = [sys.executable, "-m", "dagster", "definitions", "validate", "-f", "mine.py"]
    env = {"OUTBOX_DSN": "postgresql://db/shop", "OUTBOX_BOOTSTRAP_SERVERS": "kafka:9092", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("block", PYTHON)
def test_python_blocks_compile(block: str) -> None:
    compile(block, "README.md", "exec")


def test_every_setting_is_listed_with_its_default() -> None:
    for name, field in Settings.model_fields.items():
        [row] = re.findall(rf"^\| `OUTBOX_{name.upper()}` \|(.*?)\|", README, re.MULTILINE)
        default = "" if field.is_required() else f"`{field.default}`"
        assert row.strip() == default, name


def test_every_command_is_listed() -> None:
    said = subprocess.run([sys.executable, "-m", "outbox_plugin", "-h"], capture_output=True, text=True, check=True)
    commands = re.findall(r"^  (\w+)  ", said.stdout.split("Commands:")[1], re.MULTILINE)
    assert commands
    assert [name for name in commands if f"| `outbox {name}" not in README] == []
