"""Downloads Kafka's jars once, from Maven Central, verifies them, and keeps them in the user's cache."""

from __future__ import annotations

import hashlib
import os
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from importlib.resources import files
from pathlib import Path

from outbox_plugin.embedded.server import ServerFailed, cache_folder

KAFKA_VERSION = "4.1.1"
REPOSITORIES: dict[str, str] | None = None  # By name; None for Maven Central alone.
_CONNECTIONS = 4
_ANSWER_SECONDS = 20
_DOWNLOAD_SECONDS = 600.0
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_BUNDLE_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class JarsMissing(ServerFailed):
    """Kafka's jars are not in the cache, and could not be downloaded."""


def _list_of_jars() -> str:
    return files("outbox_plugin.embedded").joinpath(f"kafka-{KAFKA_VERSION}.sha256").read_text()


def checksums() -> dict[str, str]:
    """SHA-256 of every jar, by its coordinates in a Maven repository: group:artifact:version."""
    return {jar: digest for digest, jar in (line.split() for line in _list_of_jars().splitlines())}


def kafka_jars(tell: Callable[[str], None]) -> Path:
    """The folder with Kafka's jars, which were verified when they were downloaded. `tell` is called with progress.

    Raises:
        JarsMissing: they are not in the cache, and cannot be downloaded.
    """
    # Another list of jars has another folder: that of an earlier version may lack some.
    folder = cache_folder() / f"kafka-{KAFKA_VERSION}-{hashlib.sha256(_list_of_jars().encode()).hexdigest()[:8]}"
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="kafka-") as scratch:
            fresh = Path(scratch) / "jars"
            fresh.mkdir()
            with _system_authorities_trusted():
                _download(fresh, Path(scratch) / "repository", tell)
            fresh.rename(folder)  # Atomically, so that no other process sees a part of it.
    except OSError as error:
        if not folder.exists():  # If it exists, another process was faster.
            raise JarsMissing(
                f"Kafka's jars cannot be written to {folder.parent} ({error.strerror}): set XDG_CACHE_HOME to a "
                "writable folder"
            ) from None
    return folder


def _download(folder: Path, repository: Path, tell: Callable[[str], None]) -> None:
    broken_off = threading.Event()
    with ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="outbox-jars") as executor:
        downloads = [
            executor.submit(_download_jar, *each, folder, repository, broken_off) for each in checksums().items()
        ]
        try:
            for count, done in enumerate(as_completed(downloads, _DOWNLOAD_SECONDS), 1):
                done.result()
                tell(f"Kafka {KAFKA_VERSION}: {count} of {len(downloads)} jars")
        except TimeoutError:
            broken_off.set()
            executor.shutdown(wait=False, cancel_futures=True)
            raise JarsMissing(
                f"Kafka's jars could not be downloaded: it took longer than {_DOWNLOAD_SECONDS:.0f} s"
            ) from None
        except BaseException:
            broken_off.set()
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def _download_jar(jar: str, digest: str, folder: Path, repository: Path, broken_off: threading.Event) -> None:
    """Download a jar to `repository`, and move it to `folder` if it is the one that is expected.

    A jar may have 70 MB. So a download that has begun ends soon after `broken_off` is set, too.
    """
    try:
        from jgo.maven import MavenContext, PythonResolver
    except ImportError:
        raise JarsMissing("jgo, which downloads Kafka, is not installed: install outbox-plugin[embedded]") from None
    group, artifact, version = jar.split(":")

    def go_on(_: int) -> None:
        if broken_off.is_set():
            raise JarsMissing(f"Kafka's jars could not be downloaded: {jar} was broken off")

    central = MavenContext(
        repo_cache=repository,
        local_repos=[],
        remote_repos=REPOSITORIES,
        resolver=PythonResolver(progress_callback=lambda *_: nullcontext(go_on)),
        timeout=_ANSWER_SECONDS,
        offline=False,
    )
    try:
        downloaded = central.project(group, artifact).at_version(version).artifact().resolve()
    except (OSError, RuntimeError) as error:  # Of the library for requests, and of jgo: no repository has it.
        raise JarsMissing(f"Kafka's jars could not be downloaded: {jar}: {error}") from None
    found = hashlib.sha256(downloaded.read_bytes()).hexdigest()
    if found != digest:
        raise JarsMissing(f"{jar} is not the file that was expected (its SHA-256 is {found})")
    downloaded.rename(folder / downloaded.name)


@contextmanager
def _system_authorities_trusted() -> Iterator[None]:
    """Have downloads trust the authorities of the system, among them an administrator's own.

    The library for requests trusts those of a package, unless the environment names others.
    """
    bundle = _system_bundle()
    if bundle is None or any(os.environ.get(name) for name in _BUNDLE_VARIABLES):
        yield
        return
    before = os.environ.get(_BUNDLE_VARIABLES[0])  # It may be empty.
    os.environ[_BUNDLE_VARIABLES[0]] = bundle
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BUNDLE_VARIABLES[0]]
        else:
            os.environ[_BUNDLE_VARIABLES[0]] = before


def _system_bundle() -> str | None:
    """The file with the system's authorities; None if it is at none of the usual paths."""
    named = (os.environ.get("SSL_CERT_FILE"), ssl.get_default_verify_paths().cafile, *_BUNDLES)
    return next((name for name in named if name and Path(name).is_file()), None)
