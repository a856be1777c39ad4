"""Settings under which somebody between us and a server could read what is sent, or pose as the server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from ipaddress import ip_address

from outbox_plugin.printable import logger_of
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.settings")

_NOT_VERIFIED = frozenset({"disable", "allow", "prefer", "require", "verify-ca"})  # Postgres's, below verify-full.
_FALSE = frozenset({"false", "f", "0"})  # librdkafka's.


def warn_of_weaknesses(settings: Settings, *, postgres: bool = True) -> None:
    """Log a warning for each; once, when what uses `settings` starts. `postgres`: whether it connects to Postgres."""
    found = [*kafka_weaknesses(settings), *(postgres_weaknesses(settings, os.environ) if postgres else ())]
    for weakness in found:
        logger.warning("%s", weakness)


def kafka_weaknesses(settings: Settings) -> Iterator[str]:
    """What weakens the connections to Kafka, a line each."""
    kafka = {name: str(value).strip().lower() for name, value in settings.kafka.items()}
    if kafka.get("enable.ssl.certificate.verification") in _FALSE:
        yield (
            "OUTBOX_KAFKA: enable.ssl.certificate.verification=false: whoever stands between us and Kafka can pose as "
            "a broker; name its authority in ssl.ca.location instead"
        )
    if kafka.get("ssl.endpoint.identification.algorithm") == "none":
        yield (
            "OUTBOX_KAFKA: ssl.endpoint.identification.algorithm=none: whoever has any certificate of the same "
            "authority can pose as a broker; the default, https, compares the broker's name"
        )


def postgres_weaknesses(settings: Settings, environment: Mapping[str, str]) -> Iterator[str]:
    """What weakens the connections to Postgres, a line each.

    A line holds nothing of the DSN but its sslmode. Not even the host: of a URI whose password has an unescaped @, that
    would be a part of the password.

    Args:
        settings: whose DSN it is.
        environment: where libpq finds what the DSN does not say.
    """
    if mode := _unverified_mode(settings.dsn.get_secret_value(), environment):
        yield (
            f"OUTBOX_DSN: sslmode={mode}, with a password, and a server that is not on this machine: whoever stands in "
            "between can pose as the server, and read the password or what it protects; set sslmode=verify-full"
        )


def _unverified_mode(dsn: str, environment: Mapping[str, str]) -> str | None:
    """The sslmode, where a password goes to a server on another machine whose name nobody verifies."""
    from psycopg.conninfo import conninfo_to_dict  # Here, as consumers that need no Postgres start without it.

    given = conninfo_to_dict(dsn)

    def of(name: str) -> str:
        return str(given.get(name) or environment.get(f"PG{name.upper()}") or "")

    mode = of("sslmode") or "prefer"
    hosts = (of("hostaddr") or of("host")).split(",")
    if of("password") and mode in _NOT_VERIFIED and not all(map(_is_local, hosts)):
        return mode
    return None


def _is_local(host: str) -> bool:
    """Whether it is this machine, by a socket's path or an address that loops back."""
    host = host.strip()
    if not host or host[0] in "/@" or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
