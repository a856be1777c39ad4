"""A server of the tests closes all its sockets when it stops, whatever its clients do."""

from __future__ import annotations

import gc
import socket
import ssl
import struct
import warnings
from contextlib import ExitStack
from pathlib import Path

from tests.tls_servers import Authority, TlsFront


def test_no_socket_stays_open_whose_client_does_not_answer_the_end_of_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trusting = ssl.create_default_context(cafile=str(authority.certificate))
    certificate = authority.issue("localhost", of_server=True)
    with ExitStack() as client_side, warnings.catch_warnings(record=True) as unclosed:
        warnings.simplefilter("always", ResourceWarning)
        target = client_side.enter_context(socket.create_server(("127.0.0.1", 0)))
        with TlsFront(target.getsockname()[1], certificate).running() as front:
            plain = socket.create_connection(("127.0.0.1", front.port))
            plain.sendall(struct.pack("!ii", 8, 80877103))
            assert plain.recv(1) == b"S"
            client = client_side.enter_context(trusting.wrap_socket(plain, server_hostname="localhost"))
            target.accept()[0].close()
            assert client.recv(1) == b""  # The front has ended TLS, and waits for our answer.
        del front
        gc.collect()
    assert unclosed == []
