"""Settings that let somebody on the network read what is sent, or pose as the server; each is warned of at start."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

from outbox_plugin.printable import logger_of
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.settings")

_NOT_VERIFIED = frozenset({"disable", "allow", "prefer", "require", "verify-ca"})  # Postgres's, below verify-full.
_FALSE = frozenset({"false", "f", "0"})  # librdkafka's.
_HOST_OF_BROKER = re.compile(r"(?:\w+://)?(?:\[(?P<ipv6>[^\]]*)\]|(?P<host>[^:/]*))(?::\d+)?")


def warn_about_insecure_settings(settings: Settings, *, postgres: bool = True) -> None:
    """Log a warning for each weakness. Call it once, when what uses the settings starts.

    Args:
        settings: which servers, and how they are reached.
        postgres: whether what starts connects to Postgres.
    """
    found = [
        *insecure_kafka_settings(settings),
        *(insecure_postgres_settings(settings, os.environ) if postgres else ()),
    ]
    for weakness in found:
        logger.warning("%s", weakness)


def insecure_kafka_settings(settings: Settings) -> Iterator[str]:
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
    endpoint = _HOST_OF_BROKER.match(kafka.get("sasl.oauthbearer.token.endpoint.url", ""))
    if endpoint and endpoint[0].startswith("http://") and not _is_local(endpoint["ipv6"] or endpoint["host"]):
        yield (
            "OUTBOX_KAFKA: sasl.oauthbearer.token.endpoint.url=http://…, and a server that is not on this machine: "
            "whoever stands in between can read the client's secret and its tokens; name an https:// address"
        )
    if kafka.get("security.protocol") == "sasl_plaintext" and not _are_local(_hosts_of(settings.bootstrap_servers)):
        yield (
            "OUTBOX_KAFKA: security.protocol=SASL_PLAINTEXT, and a broker that is not on this machine: whoever stands "
            "between us and Kafka can read the events, and the password or what guesses it; set SASL_SSL"
        )


def insecure_postgres_settings(settings: Settings, environment: Mapping[str, str]) -> Iterator[str]:
    """What weakens the connections to Postgres, a line each.

    A line holds nothing of the DSN but its sslmode.

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
    """The sslmode with which a password goes to another machine whose identity is not verified; else None."""
    from psycopg.conninfo import conninfo_to_dict  # Here, as consumers that need no Postgres start without it.

    given = conninfo_to_dict(dsn)

    def option(name: str) -> str:
        return str(given.get(name) or environment.get(f"PG{name.replace('_', '').upper()}") or "")

    if option("sslrootcert") == "system":  # libpq takes no weaker sslmode than verify-full beside it.
        return None
    if option("channel_binding") == "require":  # SCRAM proves then that the server at the other end knows the password.
        return None
    mode = option("sslmode") or "prefer"
    hosts = (option("hostaddr") or option("host")).split(",")
    passfile = option("passfile") or str(Path(environment.get("HOME", os.devnull)) / ".pgpass")
    has_password = bool(option("password")) or _names_a_host(passfile, [*option("host").split(","), *hosts])
    return mode if has_password and mode in _NOT_VERIFIED and not _are_local(hosts) else None


def _names_a_host(passfile: str, hosts: Sequence[str]) -> bool:
    """Whether libpq's password file has a line for one of the hosts, or for all; its other fields are not compared."""
    try:
        lines = Path(passfile).read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return False
    named = {re.match(r"((?:\\.|[^:\\])*):", line) for line in lines if not line.startswith("#")}
    return any(re.sub(r"\\(.)", r"\1", match[1]) in {"*", *hosts} for match in named if match)


def _hosts_of(bootstrap_servers: str) -> list[str]:
    found = [_HOST_OF_BROKER.match(broker.strip()) for broker in bootstrap_servers.split(",")]
    return [match["ipv6"] or match["host"] for match in found if match]


def _are_local(hosts: Sequence[str]) -> bool:
    """Whether each host is this machine, by a socket's path or an address that loops back."""
    return all(map(_is_local, hosts))


def _is_local(host: str) -> bool:
    host = host.strip()
    if not host or host[0] in "/@" or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
