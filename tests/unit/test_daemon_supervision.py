"""When a sensor tick starts the harvester's daemon."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from psycopg.pq import Conninfo, PGconn

from outbox_plugin.dagster import daemon as daemon_module
from outbox_plugin.dagster.daemon import Daemon
from outbox_plugin.dagster.daemon_supervision import (
    RELEASED,
    DaemonAction,
    DaemonState,
    LeaseClock,
    check_lease,
    decide,
)
from outbox_plugin.errors import InvalidSetting, OutboxError
from outbox_plugin.settings import Settings

LIBPQS_FOLDER = PGconn.connect_start(b"host='' port=1").host.decode()  # Where it looks for the socket of this machine.
SETTINGS = Settings(dsn="postgresql://nowhere/none", bootstrap_servers="127.0.0.1:1")


def test_a_daemon_that_runs_is_left_alone() -> None:
    assert decide(DaemonState(running=True, starts=(), now=0.0)) is DaemonAction.LEAVE
    assert decide(DaemonState(running=True, starts=(1.0, 2.0), now=2.0)) is DaemonAction.LEAVE


def test_one_that_was_never_started_is_started() -> None:
    assert decide(DaemonState(running=False, starts=(), now=100.0)) is DaemonAction.START


def test_one_that_keeps_ending_is_started_more_and_more_slowly() -> None:
    assert decide(DaemonState(False, (100.0,), 104.9)) is DaemonAction.WAIT
    assert decide(DaemonState(False, (100.0,), 105.0)) is DaemonAction.START
    assert decide(DaemonState(False, (90.0, 95.0, 100.0), 119.9)) is DaemonAction.WAIT
    assert decide(DaemonState(False, (90.0, 95.0, 100.0), 120.0)) is DaemonAction.START


def test_the_pause_has_a_cap_and_old_starts_are_forgiven() -> None:
    often = tuple(float(number) for number in range(50))
    assert decide(DaemonState(False, often, 49.0 + 299.0)) is DaemonAction.WAIT
    assert decide(DaemonState(False, often, 49.0 + 300.0)) is DaemonAction.START
    assert decide(DaemonState(False, often, 49.0 + 900.0)) is DaemonAction.START


def test_starts_of_a_clock_that_has_been_set_back_do_not_count() -> None:
    assert decide(DaemonState(False, (1_000_000.0,), 100.0)) is DaemonAction.START


@pytest.mark.parametrize("jump", [-10 * 365 * 86_400, -60, 0, 60, 10 * 365 * 86_400])
def test_a_lease_is_measured_by_the_daemons_own_clock(jump: int) -> None:
    """Whatever the system's clock does, or that of the server which the folder lies on."""
    lease = LeaseClock(60.0)
    day = 1_700_000_000 * 10**9
    assert not lease.has_run_out(day, 5.0)
    assert not lease.has_run_out(day, 65.0)
    assert not lease.has_run_out(day + jump * 10**9 + 1, 65.5)
    assert not lease.has_run_out(day + jump * 10**9 + 1, 125.5)
    assert lease.has_run_out(day + jump * 10**9 + 1, 125.6)


def test_a_lease_that_cannot_be_read_is_not_renewed() -> None:
    lease = LeaseClock(60.0)
    assert not lease.has_run_out(None, 5.0)
    assert not lease.has_run_out(7, 10.0)
    assert not lease.has_run_out(None, 69.0)
    assert not lease.has_run_out(7, 70.0)
    assert lease.has_run_out(None, 70.1)
    assert not lease.has_run_out(8, 80.0)


def test_a_lease_that_is_released_runs_out_at_once() -> None:
    assert LeaseClock(60.0).has_run_out(RELEASED, 5.0)


@pytest.mark.parametrize(("interval", "shortest"), [(1, 10), (5, 10), (10, 20), (60, 120)])
def test_a_lease_outlives_a_tick_that_is_missed(interval: int, shortest: int) -> None:
    """Dagster looks at its sensors every 5 s, so none ticks more often."""
    check_lease(shortest, interval)
    with pytest.raises(InvalidSetting, match=f"lease_seconds: expected {shortest} or more"):
        check_lease(shortest - 0.1, interval)


@pytest.mark.parametrize("endless", [float("inf"), float("nan"), 1e12])
def test_a_lease_ends_some_day(endless: float) -> None:
    """A daemon whose lease never ends would outlive the code location that asked for it."""
    with pytest.raises(InvalidSetting, match="lease_seconds: expected 31536000 or less"):
        check_lease(endless, 10)


def test_a_folder_that_cannot_be_written_to_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    daemon = Daemon.of(SETTINGS)
    assert (daemon.running, daemon.pid, daemon.outdated) == (False, None, False)  # A tick that only observes goes on.
    with pytest.raises(InvalidSetting, match=r"^XDG_STATE_HOME: .*, which cannot be written to: Not a directory$"):
        daemon.keep_alive(60.0, 0.0)


def test_a_relative_folder_for_state_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code locations in other folders would have other daemons."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert Daemon.of(SETTINGS).folder.is_relative_to(tmp_path / ".local" / "state")
    monkeypatch.setenv("HOME", "home")
    assert Daemon.of(SETTINGS).folder.is_absolute()


def test_a_daemon_that_starts_is_not_taken_for_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose process id another process may have by now, as after a restart of the machine."""
    (tmp_path / "lock").write_text("1 lease-of-the-killed-one")
    seen = []

    def starting() -> Settings:
        daemon = Daemon(SETTINGS, tmp_path)
        seen.append((daemon.running, daemon.pid, daemon.outdated))
        raise InvalidSetting("enough")

    monkeypatch.setattr(daemon_module, "Settings", starting)
    monkeypatch.setattr(daemon_module, "stop_on", lambda *_: None)
    daemon_module.main(tmp_path, 60.0)
    assert seen == [(True, None, False)]


def named(dsn: str, table: str = "outbox") -> Daemon:
    """The daemon of the outbox that a code location names so."""
    return Daemon.of(Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1", table=table))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("service=shop", "service=bank"),
        ("postgresql://alice@db", "postgresql://bob@db"),  # The database has the user's name.
        ("postgresql://db/shop", "postgresql://db/bank"),
        ("host=db hostaddr=10.0.0.1 dbname=shop", "host=db hostaddr=10.0.0.2 dbname=shop"),
        ("host=a,b hostaddr=10.0.0.1, dbname=shop", "host=a,c hostaddr=10.0.0.1, dbname=shop"),
        ("host=a,b port=5432,5433 dbname=shop", "host=b,a port=5432,5433 dbname=shop"),
        ("host=/Tmp dbname=shop", "host=/tmp dbname=shop"),  # Names of folders, which have cases.
        ("dbname=shop options=-csearch_path=alice", "dbname=shop options=-csearch_path=bob"),
        ("dbname=shop options=-csearch_path=alice,bob", "dbname=shop options=-csearch_path=bob,alice"),
        (
            "dbname=shop user=alice options=-csearch_path=$user,public",
            "dbname=shop user=bob options=-csearch_path=$user,public",
        ),
        ("dbname=shop options=--search-path=alice", "dbname=shop"),
        ("dbname=shop options='-c Search_Path=alice'", "dbname=shop"),
        (r"dbname=shop options='-c search_path=\"Alice\"'", "dbname=shop options='-c search_path=alice'"),
        ("dbname=shop options='-csearch_path=alice -csearch_path=bob'", "dbname=shop options=-csearch_path=alice"),
    ],
)
def test_two_databases_have_a_daemon_each(one: str, other: str) -> None:
    """With one folder for both, the second project's daemon would wait for the first one's for ever."""
    assert named(one).folder != named(other).folder


@pytest.mark.parametrize("variable", ["PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE"])
def test_databases_that_variables_of_libpq_name_have_a_daemon_each(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "5433")
    one = named("postgresql://").folder
    monkeypatch.setenv(variable, "5434")
    assert named("postgresql://").folder != one


def test_services_of_two_files_have_a_daemon_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGSERVICEFILE", "/shop/services")
    one = named("service=db").folder
    monkeypatch.setenv("PGSERVICEFILE", "/bank/services")
    assert named("service=db").folder != one


def test_a_database_that_has_the_name_of_the_process_s_user_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """So another user's processes have another one."""
    for variable in ("PGUSER", "PGDATABASE"):
        monkeypatch.delenv(variable, raising=False)
    [user] = [each.val for each in Conninfo.get_defaults() if each.keyword == b"user"]
    assert user is not None
    assert named("host=db").folder == named(f"host=db dbname={user.decode()}").folder


def test_one_outbox_has_one_daemon_however_it_is_named() -> None:
    folders = {
        named("postgresql://app@db/shop").folder,
        named("postgresql://other@DB:5432/shop", "public.outbox").folder,
        named("host=db dbname=shop").folder,
    }
    assert len(folders) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("host=a,b port=5432,5433 dbname=shop", "host=b,a port=5433,5432 dbname=shop"),
        ("host=a,b port=5433 dbname=shop", "host=B,A port=5433,5433 dbname=shop"),
        ("postgresql://a,b/shop", "postgresql://b:5432,a:5432/shop"),
        (f"host={LIBPQS_FOLDER} dbname=shop", "dbname=shop"),
        (f"host={LIBPQS_FOLDER}/ port=5432 dbname=shop", "dbname=shop"),
        ("dbname=shop options=-csearch_path=public", "dbname=shop"),
        ("dbname=shop options=-cstatement_timeout=5s", "dbname=shop"),
    ],
)
def test_one_database_has_one_daemon_however_its_servers_are_named(one: str, other: str) -> None:
    assert named(one).folder == named(other).folder


def test_a_search_path_names_the_schema_of_a_table_that_is_named_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with_schema = named("dbname=shop", "alice.outbox").folder
    assert named("dbname=shop options='-c search_path=Alice'").folder == with_schema
    assert named("dbname=shop options=-csearch_path=bob", "alice.outbox").folder == with_schema
    monkeypatch.setenv("PGOPTIONS", "-c search_path=alice")
    assert named("dbname=shop").folder == with_schema
    assert named("dbname=shop options=-csearch_path=bob").folder != with_schema


def test_a_password_that_a_variable_gives_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ticks would keep a daemon that has the former password, and cannot connect any more."""
    monkeypatch.setenv("PGPASSWORD", "former")
    former = named("postgresql://db/shop")
    before = former.lease
    monkeypatch.setenv("PGPASSWORD", "present")
    assert named("postgresql://db/shop").lease.name != before.name
    assert named("postgresql://db/shop").folder == former.folder


def test_a_lease_that_a_daemon_removes_at_its_end_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(SETTINGS, tmp_path)
    daemon._renew(60.0)
    read = Path.read_text

    def removed(path: Path, *options: Any, **more: Any) -> str:
        if path == lease:
            path.unlink()
        return read(path, *options, **more)

    lease = daemon.lease
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", removed)
        daemon._renew(60.0)
    assert daemon.lease.read_text() == "60.0"


@pytest.mark.parametrize(
    "text", ["", "{}", "null", "5", '["a"]', "[[1]]", "\xff", "[NaN]", f"[{10**400}]", "[" * 100_000, "[1e999, -1e999]"]
)
def test_a_file_of_starts_that_is_damaged_is_begun_anew(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Daemon, "_start", lambda *_: None)
    daemon = Daemon(SETTINGS, tmp_path)
    (tmp_path / "starts.json").write_text(text, encoding="latin-1")
    assert daemon.keep_alive(60.0, 1_000.0) is DaemonAction.START
    assert daemon._recorded_starts() == (1_000.0,)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(
        Path, "mkdir", lambda self, **_: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    daemon = Daemon.of(SETTINGS)
    assert not daemon.running  # A tick that only observes goes on.
    with pytest.raises(InvalidSetting, match=r"^XDG_STATE_HOME: .*, which cannot be written to: Permission denied$"):
        daemon.keep_alive(60.0, 0.0)


def test_a_daemon_that_cannot_be_started_is_not_said_to_be_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the code location's environment was replaced under it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/replaced/bin/python")
    with pytest.raises(
        OutboxError, match=r"^the harvester's daemon could not be started by /replaced/bin/python: No such"
    ):
        Daemon.of(SETTINGS).keep_alive(60.0, 0.0)
