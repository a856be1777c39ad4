"""What `outbox_plugin.testing` offers, as the page shows it: its tests are run by pytest, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import blocks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_the_tests_of_the_page_pass(tmp_path: Path) -> None:
    for block in blocks("how-to/test-your-code.md", "python"):
        assert block.file
        (tmp_path / block.file).write_text(block.text)
    checkout = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{checkout}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
