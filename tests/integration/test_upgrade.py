"""An upgrade while events come: migrations under load, both versions side by side, forward, back, and forward again.

Nothing has been released yet. An early commit stands for the last release: its files are taken from the history, and
run with the libraries of this version. Where the history does not reach so far, as in a shallow clone, the schema of
that commit is made from its migrations, which are still the first ones.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import psycopg
import pytest

from outbox_plugin import Harvester, Settings
from outbox_plugin.schema import migrate as migrating
from outbox_plugin.schema.migrate import migrate, migrations
from tests.documents import CHECKOUT
from tests.harvesting import (
    HarvesterProcess,
    assert_exactly_once_in_order,
    backlog,
    consume,
    create_topic,
    drained,
    environment,
    insert_numbered,
    members,
    run_outbox,
)
from tests.support import eventually

pytestmark = [pytest.mark.integration, pytest.mark.slow]

OLD_COMMIT = "3663eee"
OLD_MIGRATIONS = "0066"  # The number of its last one.
BATCH = 100
KEYS = 100

Start = Callable[[str], HarvesterProcess]


class Writer:
    """Commits numbered rows until it is stopped, by plain SQL and by `outbox_emit` in turn."""

    def __init__(self, settings: Settings, topic: str) -> None:
        self._settings = settings
        self._topic = topic
        self._stop = threading.Event()
        self.written = 0
        self.error: Exception | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._write, name="writer")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
        assert self.error is None

    def writes_on(self) -> None:
        """Wait until it has committed some rows more."""
        before = self.written
        eventually(lambda: self.error or self.written >= before + 3 * BATCH, 60)

    def _write(self) -> None:
        try:
            while not self._stop.wait(0.02):
                if self.written // BATCH % 2:
                    self._emit()
                else:
                    insert_numbered(self._settings, self._topic, self.written + 1, BATCH, KEYS)
                self.written += BATCH
        except Exception as error:
            self.error = error

    def _emit(self) -> None:
        with psycopg.connect(self._settings.dsn.get_secret_value()) as connection:
            for number in range(self.written + 1, self.written + BATCH + 1):
                values = (self._topic, f"key-{number % KEYS}", str(number))
                connection.execute("SELECT outbox_emit(%s, %s, %s)", values)


@pytest.fixture
def topic(unmigrated: Settings, group: str) -> str:
    return create_topic(unmigrated, f"{group}-events")


def test_a_migration_under_load_fails_no_writer(
    unmigrated: Settings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = {name: text for name, text in migrations().items() if name[:4] <= OLD_MIGRATIONS}
    with monkeypatch.context() as patched:
        patched.setattr(migrating, "migrations", lambda: early)
        assert migrate(unmigrated) == list(early)
    writer = Writer(unmigrated, topic)
    with writer.running():
        writer.writes_on()
        applied = migrate(unmigrated)
        with Harvester(unmigrated):
            writer.writes_on()
            assert migrate(unmigrated) == []
            writer.writes_on()
    assert applied == [name for name in migrations() if name not in early]
    with Harvester(unmigrated):
        drained(unmigrated)
    assert_exactly_once_in_order(consume(unmigrated, topic), 1, writer.written)


@pytest.fixture(scope="module")
def old_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the old version."""
    command = ["git", "-C", str(CHECKOUT), "archive", "--format=zip", OLD_COMMIT, "outbox_plugin"]
    archive = subprocess.run(command, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the history does not have the commit {OLD_COMMIT}")
    folder = tmp_path_factory.mktemp("old-version")
    with ZipFile(BytesIO(archive.stdout)) as files:
        files.extractall(folder)
    return folder


@pytest.fixture
def start(unmigrated: Settings, old_version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a harvester of the "old" or of the "new" version."""
    started: list[HarvesterProcess] = []

    def start(version: str) -> HarvesterProcess:
        with monkeypatch.context() as patched:
            patched.setenv("PYTHONPATH", str(old_version if version == "old" else CHECKOUT))
            started.append(HarvesterProcess(unmigrated, tmp_path / f"{len(started)}-{version}.log"))
        return started[-1]

    yield start
    for each in started:
        if each.alive:
            each.kill()


def relays(harvester: HarvesterProcess, settings: Settings, writer: Writer) -> None:
    """Wait until the harvester leads, and less waits than has been written since."""
    eventually(harvester.leads, 60)
    before = writer.written
    eventually(lambda: writer.error or backlog(settings) < writer.written - before, 60)


def has_members(settings: Settings, count: int) -> None:
    """Wait until so many harvesters lead or stand by."""
    eventually(lambda: len(members(settings)) == count, 60)


def test_versions_run_side_by_side_and_no_row_is_lost_repeated_or_out_of_order(
    unmigrated: Settings, topic: str, old_version: Path, start: Start
) -> None:
    env = {**environment(unmigrated), "PYTHONPATH": str(old_version)}
    migrated = run_outbox("migrate", env=env)
    assert migrated.returncode == 0, migrated.stderr
    writer = Writer(unmigrated, topic)
    with writer.running():
        first = start("old")
        relays(first, unmigrated, writer)
        second = start("old")
        has_members(unmigrated, 2)
        assert migrate(unmigrated) != []
        relays(first, unmigrated, writer)

        third = start("new")
        has_members(unmigrated, 3)
        assert first.terminate() == 0
        fourth = start("new")
        has_members(unmigrated, 3)
        assert second.terminate() == 0
        eventually(lambda: third.leads() or fourth.leads(), 60)
        relays(third if third.leads() else fourth, unmigrated, writer)

        back = start("old")
        has_members(unmigrated, 3)
        assert third.terminate() == 0
        assert fourth.terminate() == 0
        relays(back, unmigrated, writer)

        again = start("new")
        has_members(unmigrated, 2)
        back.kill()
        relays(again, unmigrated, writer)
    drained(unmigrated)
    assert again.terminate() == 0
    assert_exactly_once_in_order(consume(unmigrated, topic), 1, writer.written)
