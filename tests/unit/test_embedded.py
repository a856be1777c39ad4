"""The parts of the embedded servers that need no server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from outbox_plugin.embedded import java
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.jars import JarsMissing, _reason, _verify, checksums, kafka_jars
from outbox_plugin.embedded.java import java_home
from outbox_plugin.embedded.server import GuardedServer, ServerFailed
from outbox_plugin.embedded.truststore import PASSWORD, system_bundle, write_trust_store

READ_STORE = """
import java.io.FileInputStream;
import java.security.KeyStore;

public class ReadStore {
    public static void main(String[] arguments) throws Exception {
        KeyStore store = KeyStore.getInstance("JKS");
        store.load(new FileInputStream(arguments[0]), arguments[1].toCharArray());
        System.out.println(store.size());
    }
}
"""


def test_java_reads_the_trust_store_that_we_write(tmp_path: Path) -> None:
    bundle = system_bundle()
    if bundle is None:
        pytest.skip("the system has no bundle of authorities where systems have it")
    store, program = tmp_path / "trusted.jks", tmp_path / "ReadStore.java"
    write_trust_store(bundle, store)
    program.write_text(READ_STORE)
    java = java_home() / "bin" / "java"
    if not (java.parent / "javac").exists():
        pytest.skip("this Java has no compiler")
    done = subprocess.run([java, str(program), str(store), PASSWORD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == bundle.read_text().count("BEGIN CERTIFICATE")


@pytest.fixture
def not_a_folder(tmp_path: Path) -> Path:
    """A place where nothing can be made, not even by root."""
    file = tmp_path / "file"
    file.touch()
    return file / "folder"


def test_servers_whose_folder_cannot_be_written_to_say_so_in_a_line(not_a_folder: Path) -> None:
    command = [sys.executable, "-m", "outbox_plugin", "dev", "--state-dir", str(not_a_folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    said = f"outbox: the servers cannot keep their data in {not_a_folder} (Not a directory): name a folder that can be"
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def test_an_empty_name_of_the_folder_does_not_mean_the_working_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outbox_plugin", "dev", "--state-dir", ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "outbox: Invalid value for '--state-dir': expected the name of a folder (given: '').\n"
    assert list(tmp_path.iterdir()) == []


def test_jars_that_cannot_be_kept_are_missing_jars(not_a_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So `outbox dev` goes on with the mock broker, and says why."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(not_a_folder))
    with pytest.raises(
        JarsMissing, match=r"cannot be written to .*outbox-plugin \(Not a directory\): .*XDG_CACHE_HOME"
    ):
        kafka_jars(lambda _: None)


def test_a_launcher_of_java_that_cannot_be_kept_is_said_in_a_line(
    not_a_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(not_a_folder))
    monkeypatch.setattr(java, "system_java_home", lambda: None)
    with pytest.raises(ServerFailed, match=r"launcher for Spark's Java cannot be written to .* \(Not a directory\)"):
        java.spark_java_home()


def test_a_jar_that_is_not_the_one_we_know_is_refused(tmp_path: Path) -> None:
    for name in checksums():
        (tmp_path / name).write_bytes(b"something else")
    with pytest.raises(JarsMissing, match="is not the file that was expected"):
        _verify(tmp_path)


def test_a_jar_that_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stranger.jar").write_bytes(b"")
    with pytest.raises(JarsMissing, match=r"stranger\.jar is not the file"):
        _verify(tmp_path)


def test_a_missing_jar_is_named(tmp_path: Path) -> None:
    with pytest.raises(JarsMissing, match=r"not complete: .*kafka_2\.13"):
        _verify(tmp_path)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("module not found: x\nServer access error at url (PKIX)", "Server access error at url (PKIX)"),
        ("\t\tmodule not found: x", "module not found: x"),
        ("", "no repository answered"),
    ],
)
def test_why_there_are_no_jars(log: str, reason: str) -> None:
    assert _reason(log) == reason


def test_a_port_is_not_one_that_an_outgoing_connection_could_take() -> None:
    port = free_port()
    assert free_port(port) == port
    lowest = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if lowest.exists():
        assert port < int(lowest.read_text().split()[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert free_port(port) != port


GIVE_PORTS = (
    "from outbox_plugin.embedded.free_ports import free_port; print([free_port() for _ in range(150)]); input()"
)


def test_a_port_is_given_once_to_whoever_asks_for_as_long_as_it_lives() -> None:
    asking = [
        subprocess.Popen([sys.executable, "-c", GIVE_PORTS], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    try:
        given = [ports for each in asking if each.stdout for ports in json.loads(each.stdout.readline())]
    finally:
        for each in asking:
            each.communicate("\n")
    assert len(given) == len(set(given)) == 600


@pytest.mark.parametrize("log_is_deleted", [False, True])
def test_a_server_that_ends_at_its_start_says_why(tmp_path: Path, log_is_deleted: bool) -> None:
    """Also if somebody has deleted its folder."""
    log = tmp_path / "log"
    code = f"import os; print('no room'); {log_is_deleted} and os.remove({str(log)!r})"
    server = GuardedServer("Kafka", [sys.executable, "-c", code], log, stop_signal="SIGTERM")
    try:
        with pytest.raises(ServerFailed) as failed:
            server.wait_until(lambda: False)
    finally:
        server.stop()
    said = "nothing that can be read (No such file or directory)" if log_is_deleted else "no room"
    assert str(failed.value) == f"Kafka ended while starting; {log} ends with: {said}"
