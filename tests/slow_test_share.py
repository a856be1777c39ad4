"""Chooses a share of the slow tests by the commit: a run can be repeated, and later commits run other shares."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from zlib import crc32

SHARES = 4


def present_share(folder: Path) -> int:
    """The share of the commit that is checked out in `folder`; the share of the day if there is no commit."""
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "--short=8", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return date.today().toordinal() % SHARES
    return int(asked.stdout, 16) % SHARES


def in_share(names: Iterable[str], share: int) -> set[str]:
    """The names of tests that belong to a share. A test stays in its share when others come and go."""
    return {name for name in names if crc32(name.encode()) % SHARES == share}
