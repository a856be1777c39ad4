"""A folder in memory, for servers whose data is not needed after the machine's end.

Nearly every test makes a database of its own, which are 300 files, and drops it. On a disk, the drop waits until they
are written. And ext4 without a journal, as in many virtual machines, checks recently deleted files before it makes a
new one: a whole run spent most of its time in the kernel on this.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

MEMORY = Path("/dev/shm")
MIN_FREE_BYTES = 4 * 1024**3  # Bytes that must be free. The servers of a process of the gate need a tenth of that.
_PREFIX = "outbox-tests-"


@contextmanager
def memory_folder(on_disk: Path) -> Iterator[Path]:
    """A folder in memory, deleted at the end; `on_disk`, where there is no such folder with enough room.

    Args:
        on_disk: an empty folder, which gets the servers' logs at the end.
    """
    if not _has_room():
        yield on_disk
        return
    _delete_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=MEMORY))
    try:
        yield folder
    finally:
        for log in folder.rglob("*/*.log"):
            if log.stem == log.parent.name:  # Kafka's data are named like logs, too.
                shutil.copy(log, on_disk)
        shutil.rmtree(folder)


def _has_room() -> bool:
    return MEMORY.is_dir() and min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) >= MIN_FREE_BYTES


def _delete_leftovers() -> None:
    """Delete the folders of processes that were killed."""
    for folder in MEMORY.glob(f"{_PREFIX}*"):
        owner = re.match(rf"{_PREFIX}(\d+)-", folder.name)
        if owner and not psutil.pid_exists(int(owner[1])):
            shutil.rmtree(folder, ignore_errors=True)
