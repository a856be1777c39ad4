"""The parts of the embedded servers that need no server."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from outbox_plugin.embedded.cluster import java_hash
from outbox_plugin.embedded.jars import JarsMissing, _reason, _verify, checksums
from outbox_plugin.embedded.java import java_home
from outbox_plugin.embedded.server import free_port
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


@pytest.mark.parametrize(
    ("text", "expected"), [("", 0), ("abc", 96354), ("polygenelubricants", -(2**31)), ("é😀", 1_996_812)]
)
def test_strings_hash_as_in_java(text: str, expected: int) -> None:
    assert java_hash(text) == expected


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
