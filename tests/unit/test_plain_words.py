"""One spelling, and the field's own words: the words that are not used, in code, tests and pages, and what is used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import CHECKOUT

INSTEAD = {
    r"stand-by|stand_by": "standby (noun), stand by (verb)",
    r"(?:mak(?:e|es|ing)|made|creat(?:e|es|ed|ing))[ _](?:\w+ ){0,3}anew": "recreate",
    r"floors?": "low watermark",
    r"portions?": "batch, part",
    r"seats?": "worker, slot",
    r"haunt(?:s|ed)?": "what keeps the rows",
}
FOLDERS = ("definitions", "deploy", "docs", "examples", "outbox_plugin", "resources", "sensors", "tests")
KINDS = {".md", ".py", ".sql", ".yaml"}
NOT_YET = (
    "outbox_plugin/schema/migrations",  # A released migration stays as it is.
    "tests/unit/test_event.py",  # Has the seats of an aircraft.
    "tests/unit/test_plain_words.py",
)


def files() -> Iterator[Path]:
    """The pages, and the files of code."""
    for path in (*CHECKOUT.glob("*.md"), *(each for folder in FOLDERS for each in (CHECKOUT / folder).rglob("*"))):
        if path.suffix in KINDS and not path.relative_to(CHECKOUT).as_posix().startswith(NOT_YET):
            yield path


def uses(word: str, text: str) -> list[str]:
    """The lines of `text` that use the word, which may be a part of a name."""
    pattern = re.compile(rf"(?<![a-z])(?:{word})(?![a-z])", re.IGNORECASE)
    return [line.strip() for line in text.splitlines() if pattern.search(line)]


@pytest.mark.parametrize(("word", "instead"), INSTEAD.items(), ids=INSTEAD.values())
def test_the_words_that_are_used_instead(word: str, instead: str) -> None:
    found = [f"{path}: {line}" for path in files() for line in uses(word, path.read_text())]
    assert not found, f"say {instead}: {found}"


def test_a_word_is_found_in_a_name_and_not_in_another_word() -> None:
    assert uses("seats?", "self._seat_settings\nSeats = 3\nan_overseat\nseating") == [
        "self._seat_settings",
        "Seats = 3",
    ]
