"""A small HTTP server on the standard library: GET only, one request per connection.

A client may be slow, or send nothing. So a connection may last for `CONNECTION_SECONDS` at most, and at most
`THREADS` connections are served at once; others wait in the kernel's queue. A client that sends its request slowly, or
never reads the answer, occupies one thread for that time and nothing else.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from outbox_plugin.errors import InvalidSetting
from outbox_plugin.printable import logger_of

logger = logger_of(__name__)

CONNECTION_SECONDS = 5.0
THREADS = 16
_POLL_SECONDS = 0.1
_QUEUED_CONNECTIONS = 128
_PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Response:
    """The response of a page."""

    body: str
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = _PLAIN


Pages = Mapping[str, Callable[[], Response]]


class HttpServer:
    """Serves `pages`, by their paths, until it is closed."""

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        """Listen on the address, and serve on a thread.

        Args:
            host: the address, or a host name.
            port: the port.
            pages: by path, the functions that make the pages.

        Raises:
            InvalidSetting: it is not possible to listen on the address.
        """
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, *_, address = found[0]
            self._listener = _Listener(family, address, pages)
        except (OSError, UnicodeError) as error:  # UnicodeError: a host name with an empty part, for example.
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            why = getattr(error, "strerror", None) or str(error)
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                why = "another program listens there"
            raise InvalidSetting(f"OUTBOX_LISTEN: cannot listen on {where}: {why}") from None
        self._thread = threading.Thread(
            target=self._listener.serve_forever, args=(_POLL_SECONDS,), name="outbox-http", daemon=True
        )
        self._thread.start()
        self._pid = os.getpid()

    def close(self) -> None:
        """Stop listening, cut off all clients, and wait until no thread is left."""
        if os.getpid() != self._pid:
            return  # In a forked child, the socket was closed at the fork, and there are no threads.
        self._listener.cut_off_all()
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()
        self._listener.cut_off_all()


class _Listener(TCPServer):
    """Accepts connections, and serves each on its own thread."""

    allow_reuse_address = True
    request_queue_size = _QUEUED_CONNECTIONS

    def __init__(self, family: int, address: Any, pages: Pages) -> None:
        self.address_family = family
        self.pages = pages
        self._free = threading.Semaphore(THREADS)
        self._open: dict[socket.socket, tuple[threading.Thread, float]] = {}  # With the time at which to cut it off.
        self._changing = threading.Lock()
        super().__init__(address, _Request)
        _listeners.add(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._free.acquire(timeout=_POLL_SECONDS):
            self.service_actions()  # Frees threads whose connections have lasted too long.
        thread = threading.Thread(
            target=self._serve, args=(request, client_address), name="outbox-http-request", daemon=True
        )
        with self._changing:
            self._open[request] = thread, time.monotonic() + CONNECTION_SECONDS
        try:
            thread.start()
        except RuntimeError:  # The process may have no more threads.
            self._done_with(request)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the standard library's.
        logger.debug("a client was not served", exc_info=True)

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception as error:
            logger.debug("a client was not answered: %r", error)
        finally:
            self.shutdown_request(request)
            self._done_with(request)

    def _done_with(self, request: socket.socket) -> None:
        with self._changing:
            del self._open[request]
        self._free.release()

    def forget(self) -> None:
        """Close this process's copies of the sockets. The parent process's connections stay open."""
        for each in (self.socket, *self._open):
            each.close()

    def service_actions(self) -> None:
        """Cut off clients that have been connected for too long. Called several times a second."""
        now = time.monotonic()
        with self._changing:
            for request, (_, until) in self._open.items():
                if now > until:
                    _cut_off(request)

    def cut_off_all(self) -> None:
        """Cut off all clients, and wait for the threads."""
        with self._changing:
            threads = [thread for thread, _ in self._open.values()]
            for request in self._open:
                _cut_off(request)
        for thread in threads:
            thread.join(CONNECTION_SECONDS)


def _cut_off(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Request(BaseHTTPRequestHandler):
    """Answers one request."""

    server: _Listener
    timeout = CONNECTION_SECONDS
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = _PLAIN

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND, f"there are only {', '.join(self.server.pages)}")
            return
        answer = page()
        body = answer.body.encode(errors="replace")
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer an error in plain text. Any method other than GET is not allowed."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, "only GET is served"
        super().send_error(code, message, explain)

    def end_headers(self) -> None:
        self.send_header("Allow", "GET")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def version_string(self) -> str:
        return "outbox"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the standard library's name.
        logger.debug(format, *args)


_listeners: weakref.WeakSet[_Listener] = weakref.WeakSet()


def _forget_listeners() -> None:
    """After a fork, close the child's copies of the sockets, so that they do not keep the port in use."""
    for listener in list(_listeners):
        listener.forget()


os.register_at_fork(after_in_child=_forget_listeners)
