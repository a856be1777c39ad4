"""What holds for every command: its help needs neither settings nor servers, and no option takes nan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from outbox_plugin.cli import outbox


def _commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Each command below a group, with its words."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from _commands(command, *path, name)


@pytest.mark.parametrize("words", [words for words, _ in _commands(outbox)], ids=" ".join)
def test_each_command_shows_its_help_without_settings(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("OUTBOX_DSN", "OUTBOX_BOOTSTRAP_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(outbox, [*words, "--help"])
    assert done.exit_code == 0, done.output or done.exception
    assert done.output.startswith(f"Usage: outbox {' '.join(words)} ")


def test_no_option_takes_a_number_that_is_not_finite() -> None:
    """Every comparison with nan is false, so what waits for so many seconds does not wait, or for ever."""
    options = [
        option
        for _, command in _commands(outbox)
        for option in command.params
        if isinstance(option.type, click.types.FloatParamType)
    ]
    assert len(options) > 10
    for option in options:
        for number in ("nan", "inf"):
            with pytest.raises(click.BadParameter, match=f"expected a finite number .given: {number}"):
                option.type.convert(number, option, None)
