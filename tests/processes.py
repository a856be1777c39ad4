"""Processes of other programs, any of which may end while a test looks at it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def kill(processes: Iterable[psutil.Process]) -> None:
    """kill -9 whatever is left of them."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def kill_tree(process: psutil.Process) -> None:
    """kill -9 it and all below it, at once as when a machine is lost."""
    kill(_suspended(process))


def _suspended(process: psutil.Process) -> list[psutil.Process]:
    """It and all below it, lest one starts another, or notices that another is gone."""
    found = []
    with suppress(psutil.NoSuchProcess):
        process.suspend()
        found.append(process)
        for child in process.children():
            found += _suspended(child)
    return found


def command_of(process: psutil.Process) -> str:
    """Its command; nothing once it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; who waits to be reaped has."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
