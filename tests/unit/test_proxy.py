"""The TCP proxy of the benchmarks and tests: what passes, what is held, what is gone."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterator

import pytest

from outbox_plugin.bench.proxy import Proxy
from tests.support import eventually


class Echo:
    """A server that sends back what it gets, on as many connections as come."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.received = b""
        self.ended = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65_536):
                    self.received += data
                    connection.sendall(data)
            except OSError:
                pass
        self.ended += 1

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as client:
        client.sendall(b"hello")
        assert client.recv(100) == b"hello"
        yield client


def silent(client: socket.socket) -> bool:
    """Nothing comes, and the connection stays open."""
    client.settimeout(0.2)
    try:
        client.recv(100)
    except TimeoutError:
        return True
    finally:
        client.settimeout(5)
    return False


def test_a_large_body_passes_both_ways(client: socket.socket) -> None:
    body = bytes(range(256)) * 20_000
    sender = threading.Thread(target=client.sendall, args=(body,))
    sender.start()
    came = b""
    while len(came) < len(body):
        came += client.recv(1 << 20)
    sender.join()
    assert came == body


def test_the_end_of_one_side_reaches_the_other(client: socket.socket, echo: Echo, proxy: Proxy) -> None:
    client.shutdown(socket.SHUT_WR)
    assert client.recv(100) == b""
    eventually(lambda: (echo.ended, proxy.connections) == (1, 0), 5)


def test_cut_resets(client: socket.socket, echo: Echo, proxy: Proxy) -> None:
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        client.recv(100)
    eventually(lambda: echo.ended == 1, 5)


def test_what_is_held_to_the_server_is_delivered_late(client: socket.socket, echo: Echo, proxy: Proxy) -> None:
    proxy.hold("to server")
    client.sendall(b"later")
    assert silent(client)
    assert echo.received == b"hello"
    proxy.restore()
    assert client.recv(100) == b"later"


def test_what_is_held_to_the_client_has_reached_the_server(client: socket.socket, echo: Echo, proxy: Proxy) -> None:
    proxy.hold("to client")
    client.sendall(b"later")
    eventually(lambda: echo.received == b"hellolater", 5)
    assert silent(client)
    proxy.restore()
    assert client.recv(100) == b"later"


def test_a_held_request_arrives_though_its_client_has_gone(client: socket.socket, echo: Echo, proxy: Proxy) -> None:
    proxy.hold("to server")
    client.sendall(b"late")
    client.close()
    proxy.restore()
    eventually(lambda: echo.received == b"hellolate", 5)


def test_new_connections_are_accepted_and_held_too(echo: Echo, proxy: Proxy) -> None:
    proxy.hold("to server", "to client")
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as client:
        client.sendall(b"new")
        assert silent(client)
        proxy.restore()
        assert client.recv(100) == b"new"


def test_what_is_discarded_never_arrives_and_the_connection_is_reset(
    client: socket.socket, echo: Echo, proxy: Proxy
) -> None:
    proxy.discard("to client")
    client.sendall(b"gone")
    assert silent(client)
    eventually(lambda: echo.received == b"hellogone", 5)
    proxy.restore()
    with pytest.raises(ConnectionResetError):
        client.recv(100)


def test_discarding_spares_a_connection_that_lost_nothing(client: socket.socket, proxy: Proxy) -> None:
    proxy.discard("to server")
    proxy.restore()
    client.sendall(b"whole")
    assert client.recv(100) == b"whole"


def test_half_open_ends_the_servers_side_only(client: socket.socket, echo: Echo, proxy: Proxy) -> None:
    proxy.half_open()
    eventually(lambda: echo.ended == 1, 5)
    client.sendall(b"anybody?")
    assert silent(client)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as fresh:
        fresh.sendall(b"new")
        assert fresh.recv(100) == b"new"
    proxy.restore()
    with pytest.raises(ConnectionResetError):
        client.recv(100)


def test_the_target_may_change(client: socket.socket, proxy: Proxy) -> None:
    other = Echo()
    proxy.target = other.port
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as fresh:
        fresh.sendall(b"other")
        assert fresh.recv(100) == b"other"
    assert other.received == b"other"
    other.close()


def test_a_server_that_is_away_is_a_reset(proxy: Proxy, echo: Echo) -> None:
    proxy.target = 1
    with pytest.raises(ConnectionResetError), socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as client:
        client.recv(100)


def test_a_connection_that_comes_as_the_proxy_ends_is_reset(echo: Echo) -> None:
    """It is accepted, and ended before it was served: its sockets are closed all the same."""
    proxy = Proxy(echo.port)
    proxy.start()
    go_on = threading.Event()
    proxy._loop.call_soon_threadsafe(go_on.wait, 60)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as client:
        proxy._loop.call_soon_threadsafe(proxy._loop.stop)
        go_on.set()
        proxy._thread.join()
        with pytest.raises(ConnectionResetError):
            client.recv(100)
    gc.collect()  # A socket that was forgotten says so now, and fails the test.


def test_stop_is_safe_to_call_twice(echo: Echo) -> None:
    proxy = Proxy(echo.port)
    proxy.stop()
    proxy.start()
    proxy.stop()
    proxy.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port), timeout=1)
