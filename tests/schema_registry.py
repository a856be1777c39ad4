"""A server that speaks the REST protocol of a schema registry, as far as the clients of producers and consumers use it.

Schemas of Avro evolve backward: a reader with the new schema must be able to read what was written with the last one.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

SILENCE_SECONDS = 60.0  # Then the server closes the connection, so that a client that waits for ever fails a test.
_PATHS = {
    name: re.compile(pattern)
    for name, pattern in {
        "subjects": r"/subjects",
        "register": r"/subjects/([^/]+)/versions",
        "version": r"/subjects/([^/]+)/versions/([^/]+)",
        "lookup": r"/subjects/([^/]+)",
        "by_id": r"/schemas/ids/(\d+)",
        "compatible": r"/compatibility/subjects/([^/]+)/versions/([^/]+)",
    }.items()
}


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status, self.body = status, {"error_code": code, "message": message}


class Registry:
    """The state of the server, and how it misbehaves.

    `failing` is the status of every answer, if it is set; while `silent` is set, requests get no answer. `answering`
    makes the status and the content of every answer from the request's headers; while `trickling` is set, an answer has
    no end.
    """

    def __init__(self) -> None:
        self.url = ""
        self.subjects: dict[str, list[int]] = {}  # The ids of each subject's versions.
        self.requests: list[str] = []
        self.failing: int | None = None
        self.page: bytes | None = None  # What a proxy answers in its place.
        self.answering: Callable[[Mapping[str, str]], tuple[int, bytes]] | None = None
        self.silent = threading.Event()
        self.trickling = threading.Event()
        self.closing = threading.Event()
        self._schemas: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """The answer to a request.

        Raises:
            Refused: it is an error.
        """
        if self.failing is not None:
            raise Refused(self.failing, self.failing * 100, "told to fail")
        for name, pattern in _PATHS.items():
            if found := pattern.fullmatch(path):
                with self._lock:
                    return getattr(self, f"_{method.lower()}_{name}")(*map(unquote, found.groups()), body)
        raise Refused(404, 404, f"HTTP 404 Not Found: {path}")

    def _get_subjects(self, _: dict[str, Any]) -> Any:
        return sorted(self.subjects)

    def _get_register(self, subject: str, _: dict[str, Any]) -> Any:
        return list(range(1, len(self._versions(subject)) + 1))

    def _post_register(self, subject: str, body: dict[str, Any]) -> Any:
        versions = self.subjects.get(subject, [])
        schema = _schema(body)
        if versions and not _is_readable(schema, self._schemas[versions[-1] - 1]):
            raise Refused(409, 409, f'Schema being registered is incompatible with an earlier schema for "{subject}"')
        if schema not in self._schemas:
            self._schemas.append(schema)
        id_ = self._schemas.index(schema) + 1
        if id_ not in versions:
            self.subjects[subject] = [*versions, id_]
        return self._described(subject, id_)

    def _post_lookup(self, subject: str, body: dict[str, Any]) -> Any:
        for id_ in self._versions(subject):
            if self._schemas[id_ - 1] == _schema(body):
                return self._described(subject, id_)
        raise Refused(404, 40403, "Schema not found")

    def _get_version(self, subject: str, version: str, _: dict[str, Any]) -> Any:
        versions = self._versions(subject)
        number = len(versions) if version == "latest" else int(version)
        if not 0 < number <= len(versions):
            raise Refused(404, 40402, f"Version {version} not found.")
        return self._described(subject, versions[number - 1])

    def _get_by_id(self, id_: str, _: dict[str, Any]) -> Any:
        if not 0 < int(id_) <= len(self._schemas):
            raise Refused(404, 40403, f"Schema {id_} not found")
        return self._schemas[int(id_) - 1]

    def _post_compatible(self, subject: str, version: str, body: dict[str, Any]) -> Any:
        former = self._get_version(subject, version, {})["id"]
        return {"is_compatible": _is_readable(_schema(body), self._schemas[former - 1])}

    def _versions(self, subject: str) -> list[int]:
        if subject not in self.subjects:
            raise Refused(404, 40401, f"Subject '{subject}' not found.")
        return self.subjects[subject]

    def _described(self, subject: str, id_: int) -> dict[str, Any]:
        version = self.subjects[subject].index(id_) + 1
        return {"subject": subject, "version": version, "id": id_, **self._schemas[id_ - 1]}


def _schema(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in ("schema", "schemaType", "references") if body.get(name)}


def _is_readable(schema: dict[str, Any], former: dict[str, Any]) -> bool:
    """Whether a reader with `schema` can read what was written with `former`, by the rule for fields of records."""
    if schema.get("schemaType", "AVRO") != "AVRO":
        return True
    new, old = json.loads(schema["schema"]), json.loads(former["schema"])
    if not isinstance(new, dict) or not isinstance(old, dict) or "fields" not in new:
        return bool(new == old)
    known = {field["name"]: field["type"] for field in old["fields"]}
    return all(
        field["type"] == known[field["name"]] if field["name"] in known else "default" in field
        for field in new["fields"]
    )


@contextmanager
def a_registry() -> Iterator[Registry]:
    """A server on a free port, with nothing registered."""
    registry = Registry()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            content = self.rfile.read(size)
            body = json.loads(content) if "json" in self.headers.get("Content-Type", "") else {}
            path = urlsplit(self.path).path
            registry.requests.append(f"{self.command} {unquote(path)}")
            if registry.silent.is_set():
                registry.closing.wait(SILENCE_SECONDS)
                self.close_connection = True
                return
            if registry.trickling.is_set():
                self._trickle()
                return
            status = 200
            try:
                answer = registry.answer(self.command, path, body)
            except Refused as refused:
                status, answer = refused.status, refused.body
            content = json.dumps(answer).encode() if registry.page is None else registry.page
            if registry.answering is not None:
                status, content = registry.answering(dict(self.headers))
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _trickle(self) -> None:
            """Send a byte now and then, so that a client's time-out for each read never ends."""
            self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            with suppress(ConnectionError):
                while registry.trickling.is_set() and not registry.closing.wait(0.02):
                    self.wfile.write(b" ")

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the standard library's name.
            """Says nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        registry.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield registry
        finally:
            registry.closing.set()
            server.shutdown()
            thread.join()
