"""A folder in memory, for servers whose data is not needed after the machine's end.

Nearly every test makes a database of its own, which are 300 files, and drops it. On a disk, the drop waits until they
are written. A file system without a journal, as in many virtual machines, looks at all files that were deleted of late
before it makes one: that was most of the time that a whole run spent in the kernel.
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
ENOUGH = 4 * 1024**3  # Bytes that must be free. The servers of a process of the gate need a tenth of that.
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
    return MEMORY.is_dir() and min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) >= ENOUGH


def _delete_leftovers() -> None:
    """Delete the folders of processes that were killed."""
    for folder in MEMORY.glob(f"{_PREFIX}*"):
        owner = re.match(rf"{_PREFIX}(\d+)-", folder.name)
        if owner and not psutil.pid_exists(int(owner[1])):
            shutil.rmtree(folder, ignore_errors=True)
