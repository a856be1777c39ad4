"""The parts of the embedded servers that need no server."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from outbox_plugin.embedded import jars, java
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.jars import JarsMissing, kafka_jars
from outbox_plugin.embedded.server import GuardedServer, ServerFailed


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


JARS = {"org.ours:one:1.0": b"the first", "org.ours:two:2.0": b"the second"}
ONE, TWO = "org/ours/one/1.0/one-1.0.jar", "org/ours/two/2.0/two-2.0.jar"


class Repository(ThreadingHTTPServer):
    """Serves jars, as Maven Central does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", free_port()), Answers)
        self.served = dict(zip((ONE, TWO), JARS.values(), strict=True))


class Answers(BaseHTTPRequestHandler):
    server: Repository

    def do_GET(self) -> None:
        content = self.server.served.get(self.path.lstrip("/"))
        self.send_response(404 if content is None else 200)
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """A repository with the jars that are wanted, and an empty cache."""
    wanted = "".join(f"{hashlib.sha256(content).hexdigest()}  {jar}\n" for jar, content in JARS.items())
    server = Repository()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(jars, "_list_of_jars", lambda: wanted)
    monkeypatch.setattr(jars, "REPOSITORIES", {"ours": f"http://127.0.0.1:{server.server_port}"})
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def left_in_the_cache(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.name.startswith("kafka-"))


def test_jars_are_downloaded_once(repository: Repository, tmp_path: Path) -> None:
    said: list[str] = []
    folder = kafka_jars(said.append)
    assert {jar.name: jar.read_bytes() for jar in folder.iterdir()} == {
        "one-1.0.jar": b"the first",
        "two-2.0.jar": b"the second",
    }
    assert said == [f"Kafka {jars.KAFKA_VERSION}: {count} of 2 jars" for count in (1, 2)]
    repository.served.clear()
    assert kafka_jars(said.append) == folder
    assert left_in_the_cache(tmp_path) == [folder.name]


def test_another_list_of_jars_has_another_folder(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    before, jar = kafka_jars(lambda _: None), "org.ours:two:2.0"
    monkeypatch.setattr(jars, "_list_of_jars", lambda: f"{hashlib.sha256(JARS[jar]).hexdigest()}  {jar}\n")
    assert [jar.name for jar in kafka_jars(lambda _: None).iterdir()] == ["two-2.0.jar"]
    assert len(list(before.iterdir())) == 2


def test_a_jar_that_is_not_the_one_we_know_is_refused(repository: Repository, tmp_path: Path) -> None:
    repository.served[TWO] = b"another"
    with pytest.raises(
        JarsMissing, match=r"org\.ours:two:2\.0 is not the file that was expected \(its SHA-256 is ae448ac8"
    ):
        kafka_jars(lambda _: None)
    assert left_in_the_cache(tmp_path) == []


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # jgo leaves such an answer's socket open.
def test_a_jar_that_is_not_there_is_named(repository: Repository, tmp_path: Path) -> None:
    del repository.served[ONE]
    with pytest.raises(JarsMissing, match=r"could not be downloaded: org\.ours:one:1\.0: .*not found"):
        kafka_jars(lambda _: None)
    assert left_in_the_cache(tmp_path) == []
    gc.collect()  # So that the warning comes in this test.


def test_a_repository_that_is_away_is_missing_jars(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "REPOSITORIES", {"ours": f"http://127.0.0.1:{free_port()}"})
    with pytest.raises(JarsMissing, match=r"could not be downloaded: .*Connection refused"):
        kafka_jars(lambda _: None)


def test_a_download_has_a_bounded_time(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "_DOWNLOAD_SECONDS", -1)
    with pytest.raises(JarsMissing, match=r"could not be downloaded: it took longer than"):
        kafka_jars(lambda _: None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # As above.
def test_a_download_that_is_broken_off_does_not_wait_for_the_rest_of_a_jar(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second jar is missing. What is left of the first one would still come for a while."""
    began, client_went = threading.Event(), threading.Event()

    class Slow(Answers):
        def do_GET(self) -> None:
            if not self.path.endswith(ONE):
                began.wait(10)
                super().do_GET()
                return
            self.send_response(200)
            self.send_header("Content-Length", "10000000")
            self.end_headers()
            try:
                for _ in range(1_000):
                    self.wfile.write(bytes(10_000))
                    began.set()
                    time.sleep(0.01)
            except OSError:
                client_went.set()

    del repository.served[TWO]
    monkeypatch.setattr(repository, "RequestHandlerClass", Slow)
    with pytest.raises(JarsMissing, match=r"org\.ours:two:2\.0: .*not found"):
        kafka_jars(lambda _: None)
    gc.collect()  # Then the socket of what was broken off is closed.
    assert client_went.wait(10)


@pytest.mark.parametrize("named", [None, "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
@pytest.mark.parametrize("empty", [False, True])
def test_the_authorities_of_the_system_are_trusted_unless_others_are_named(
    empty: bool, named: str | None, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted: list[str] = []
    (bundle := tmp_path / "bundle.pem").touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(variable, raising=False)
        if empty:
            monkeypatch.setenv(variable, "")
    if named is not None:
        monkeypatch.setenv(named, "/others.pem")
    environment = dict(os.environ)
    kafka_jars(lambda _: trusted.extend(os.environ.get(each, "") for each in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")))
    assert set(trusted) == {"", str(bundle) if named is None else "/others.pem"}
    assert dict(os.environ) == environment


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
