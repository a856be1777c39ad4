"""The example application: at both ends of the wire, with two workers, while they are killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outbox_plugin import Settings
from tests.harvesting import environment

pytestmark = pytest.mark.integration

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_committed_order_is_shipped_once_and_in_order_though_both_workers_are_killed(settings: Settings) -> None:
    command = [sys.executable, "-m", "examples.end_to_end", "--posts", "600", "--kills", "2", "--json"]
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environment(settings), capture_output=True, text=True, timeout=840, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    figures = json.loads(done.stdout)
    assert (figures["killed"], figures["committed"] > 300) == (2, True)
    assert figures["answers"]["409"] > 0  # These rolled back, after their event was raised.
    assert figures["committed"] == figures["shipped"]


@pytest.mark.skipif(shutil.which("node") is None, reason="pyright needs a Node.js")
def test_the_example_is_clean_to_a_second_type_checker() -> None:
    """Pyright judges what a user's editor would show."""
    checked = ["examples/shop.py", "tests/typing_emit.py"]
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *checked]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout
