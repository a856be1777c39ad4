"""Waits for conditions, with time-outs that are scaled here for slow machines; tells which files share Spark."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

# Bounds are those of a machine with nothing else to do. In the gate, a process gets a third of that machine.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "3"))


def eventually(condition: Callable[[], object], seconds: float) -> None:
    """Return as soon as `condition` is true. Fail if it is not within `seconds`."""
    deadline = time.monotonic() + seconds * PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds * PATIENCE:.0f} s"
        time.sleep(0.02)


def begins_with_shared_spark(item: pytest.Item) -> bool:
    """Whether the test, a file's first one, uses the Spark session that integration tests share."""
    return "tests/integration/" in item.path.as_posix() and "spark" in getattr(item, "fixturenames", ())
