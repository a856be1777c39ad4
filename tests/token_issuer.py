"""A Kafka that lets in who has a token, and an issuer of such tokens: a function, or an OIDC endpoint."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.kafka import EmbeddedKafka

LIFE_SECONDS = 8.0
CLIENT_ID, CLIENT_SECRET = "shop-relay", "s3cret+of/the=client"
_LOGIN = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"  # It accepts tokens that nobody signs.
_SECURITY = """listeners=INTERNAL://127.0.0.1:{internal},TOKENS://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=INTERNAL://127.0.0.1:{internal},TOKENS://127.0.0.1:{port}
listener.security.protocol.map=INTERNAL:PLAINTEXT,TOKENS:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=INTERNAL
sasl.enabled.mechanisms=OAUTHBEARER
connections.max.reauth.ms=3600000
listener.name.tokens.oauthbearer.sasl.jaas.config={login} required unsecuredLoginStringClaim_sub="broker";
"""
BY_FUNCTION = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER"}


class TokenKafka(EmbeddedKafka):
    """Ends connections whose token has expired, as a managed Kafka does. `internal` is for the tests alone."""

    @property
    def internal(self) -> str:
        return f"127.0.0.1:{self._internal}"

    def properties(self, port: int, data: str) -> str:
        self._internal, controller = free_port(), free_port()
        ours = _SECURITY.format(internal=self._internal, port=port, controller=controller, login=_LOGIN)
        replaced = {line.partition("=")[0] for line in ours.splitlines()} | {"controller.quorum.voters"}
        kept = [line for line in super().properties(port, data).splitlines() if line.partition("=")[0] not in replaced]
        return "\n".join([*kept, f"controller.quorum.voters=1@127.0.0.1:{controller}", ours])

    def answers(self, port: int) -> bool:
        return super().answers(self._internal)


class Issuer:
    """Issues tokens, and remembers them. It fails if a test asks it to."""

    def __init__(self) -> None:
        self.issued: list[str] = []
        self.fails = False
        self._lock = threading.Lock()

    def token(self) -> tuple[str, float]:
        """A token provider."""
        if self.fails:
            raise PermissionError(f"the issuer says no to {CLIENT_SECRET}")
        return self.issue()

    def issue(self) -> tuple[str, float]:
        now = time.time()
        claims = {"sub": CLIENT_ID, "iat": now, "exp": now + LIFE_SECONDS, "scope": f"number{len(self.issued)}"}
        token = f"{_encoded({'alg': 'none'})}.{_encoded(claims)}."
        with self._lock:
            self.issued.append(token)
        return token, now + LIFE_SECONDS

    @contextmanager
    def endpoint(self) -> Iterator[str]:
        """An OIDC token endpoint; yields its address."""
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                login = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
                known = self.headers["Authorization"] == f"Basic {login}" and asked["grant_type"]
                if issuer.fails or not known:
                    self._answer(401, {"error": "invalid_client", "error_description": "no such client"})
                else:
                    self._answer(200, {"access_token": issuer.issue()[0], "token_type": "Bearer"})

            def _answer(self, code: int, content: object) -> None:
                body = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name.
                """Log nothing."""

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, name="issuer", daemon=True)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}/token"
            finally:
                server.shutdown()
                thread.join()


ISSUER = Issuer()  # Whose `token` is named in OUTBOX_KAFKA_TOKEN_PROVIDER.


def _encoded(content: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
