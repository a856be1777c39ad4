"""Waiting for conditions; the one place that scales the patience for slow machines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# Bounds are those of a machine with nothing else to do. In the gate, a process gets a third of that machine.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "3"))


def eventually(condition: Callable[[], object], seconds: float) -> None:
    """Return as soon as `condition` is true; fail when it is not within `seconds`."""
    deadline = time.monotonic() + seconds * PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds * PATIENCE:.0f} s"
        time.sleep(0.02)
