"""Downloads Kafka's jars once, with the Ivy that pyspark ships, verifies them, and keeps them in the user's cache."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from outbox_plugin.embedded.java import java_home, system_java_home
from outbox_plugin.embedded.server import ServerFailed, cache_folder
from outbox_plugin.embedded.truststore import PASSWORD, system_bundle, write_trust_store

KAFKA_VERSION = "4.1.1"
RESOLVE_SECONDS = 600
_IVY_MODULE = """<ivy-module version="2.0">
  <info organisation="outbox-plugin" module="embedded-kafka"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
    <dependency org="org.apache.kafka" name="kafka_2.13" rev="{version}" conf="default->default(*),runtime(*)"/>
  </dependencies>
</ivy-module>
"""


class JarsMissing(ServerFailed):
    """Kafka's jars are not in the cache, and could not be downloaded."""


def checksums() -> dict[str, str]:
    """SHA-256 of every jar, by file name."""
    lines = files("outbox_plugin.embedded").joinpath(f"kafka-{KAFKA_VERSION}.sha256").read_text().splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def kafka_jars(tell: Callable[[str], None]) -> Path:
    """The folder with Kafka's jars, which were verified when they were downloaded. `tell` is called with progress.

    Raises:
        JarsMissing: they are not in the cache, and cannot be downloaded.
    """
    folder = cache_folder() / f"kafka-{KAFKA_VERSION}"
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="kafka-") as scratch:
            fresh = _resolve(Path(scratch), tell)
            _verify(fresh)
            fresh.rename(folder)  # Atomically, so that no other process sees a part of it.
    except OSError as error:
        if not folder.exists():  # If it exists, another process was faster.
            raise JarsMissing(
                f"Kafka's jars cannot be written to {folder.parent} ({error.strerror}): set XDG_CACHE_HOME to a "
                "writable folder"
            ) from None
    return folder


def _resolve(scratch: Path, tell: Callable[[str], None]) -> Path:
    module, jars, log = scratch / "ivy.xml", scratch / "jars", scratch / "ivy.log"
    module.write_text(_IVY_MODULE.format(version=KAFKA_VERSION))
    total = len(checksums())
    command = [
        *(str(java_home() / "bin" / "java"), *_trust(scratch), "-cp", str(_ivy()), "org.apache.ivy.Main"),
        *("-ivy", str(module), "-cache", str(scratch / "cache"), "-confs", "default"),
        *("-retrieve", f"{jars}/[artifact]-[revision].[ext]"),
    ]
    with log.open("wb") as output:
        ivy = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        began, reported = time.monotonic(), -1
        while ivy.poll() is None:
            downloaded = sum(1 for _ in (scratch / "cache").rglob("*.jar"))
            if downloaded != reported:
                tell(f"Kafka {KAFKA_VERSION}: {downloaded} of {total} jars")
                reported = downloaded
            if time.monotonic() - began > RESOLVE_SECONDS:
                raise JarsMissing(f"Kafka's jars could not be downloaded within {RESOLVE_SECONDS} s")
            time.sleep(0.25)
    finally:
        ivy.kill()
        ivy.wait()
    if ivy.returncode or not jars.exists():
        raise JarsMissing(f"Kafka's jars could not be downloaded: {_reason(log.read_text(errors='replace'))}")
    return jars


def _trust(scratch: Path) -> list[str]:
    """Java options for trusting the system's certificate authorities, for a Java that is not the system's."""
    bundle = system_bundle()
    if system_java_home() is not None or bundle is None:
        return []
    store = scratch / "trusted.jks"
    write_trust_store(bundle, store)
    return [f"-Djavax.net.ssl.trustStore={store}", f"-Djavax.net.ssl.trustStorePassword={PASSWORD}"]


def _reason(log: str) -> str:
    """The reason in Ivy's log why there are no jars: an error of the network, else what was not found."""
    for sign in ("Server access error", "Host ", "not found"):
        if said := [line.strip() for line in log.splitlines() if sign in line]:
            return said[0][:300]
    return "no repository answered"


def _verify(folder: Path) -> None:
    """Raises JarsMissing unless the folder has all jars whose checksums we know, and they match. Others are removed."""
    expected = checksums()
    for jar in folder.iterdir():
        digest = hashlib.sha256(jar.read_bytes()).hexdigest()
        if expected.pop(jar.name, None) != digest:
            raise JarsMissing(f"{jar.name} is not the file that was expected (its SHA-256 is {digest})")
    if expected:
        raise JarsMissing(f"Kafka's jars are not complete: {', '.join(sorted(expected))}")


def _ivy() -> Path:
    found = _shipped_with_spark("ivy-*.jar")
    if not found:
        raise JarsMissing("pyspark, whose Ivy downloads Kafka, is not installed: install outbox-plugin[embedded]")
    return found[-1]


def logging_jars() -> list[Path]:
    """Spark's logging jars, to put before Kafka's on the class path; empty without pyspark.

    Kafka's jars have slf4j without a backend, so a broker that cannot start would not log the reason.
    """
    patterns = ("slf4j-api-*.jar", "log4j-slf4j2-impl-*.jar", "log4j-api-*.jar", "log4j-core-*.jar")
    return [jar for pattern in patterns for jar in _shipped_with_spark(pattern)]


def _shipped_with_spark(pattern: str) -> list[Path]:
    spec = find_spec("pyspark")
    return sorted(Path(spec.origin).parent.joinpath("jars").glob(pattern)) if spec and spec.origin else []
