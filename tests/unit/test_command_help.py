"""The help of a command needs neither settings nor servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from outbox_plugin.cli import outbox


def _commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    """The words of each command below a group."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from _commands(command, *path, name)


@pytest.mark.parametrize("words", list(_commands(outbox)), ids=" ".join)
def test_each_command_shows_its_help_without_settings(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("OUTBOX_DSN", "OUTBOX_BOOTSTRAP_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(outbox, [*words, "--help"])
    assert done.exit_code == 0, done.output or done.exception
    assert done.output.startswith(f"Usage: outbox {' '.join(words)} ")
