"""The folder in memory for the servers of the tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import memory_folder as module
from tests.memory_folder import memory_folder


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the memory, with enough room."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(module, "MEMORY", memory)
    monkeypatch.setattr(module, "MIN_FREE_BYTES", 1)
    return memory


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def test_the_folder_is_gone_at_the_end_and_the_servers_logs_are_on_the_disk(memory: Path, on_disk: Path) -> None:
    with memory_folder(on_disk) as folder:
        assert folder.parent == memory
        data = folder / "stack" / "kafka" / "data"
        data.mkdir(parents=True)
        (data.parent / "kafka.log").write_text("started")
        (data / "00000000000000000000.log").write_text("records")
    assert not [*memory.iterdir()]
    assert [(each.name, each.read_text()) for each in on_disk.iterdir()] == [("kafka.log", "started")]


def test_too_little_room_leaves_the_servers_on_the_disk(
    memory: Path, on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_FREE_BYTES", 2**63)
    with memory_folder(on_disk) as folder:
        assert folder == on_disk


def test_a_system_without_such_memory_leaves_the_servers_on_the_disk(
    memory: Path, on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEMORY", memory / "absent")
    with memory_folder(on_disk) as folder:
        assert folder == on_disk


def test_the_folders_of_killed_runs_are_deleted_and_those_of_running_ones_kept(memory: Path, on_disk: Path) -> None:
    killed = subprocess.Popen(["true"])
    killed.wait()
    (memory / f"outbox-tests-{killed.pid}-x" / "stack").mkdir(parents=True)
    running = memory / f"outbox-tests-{os.getpid()}-x"
    others = memory / "of another program"
    running.mkdir()
    others.mkdir()
    with memory_folder(on_disk) as folder:
        assert {*memory.iterdir()} == {folder, running, others}
