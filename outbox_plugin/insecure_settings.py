"""Warns at start of settings that let somebody on the network read what is sent, or impersonate the server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

from outbox_plugin.printable import logger_of
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.settings")

_NOT_VERIFIED = frozenset({"disable", "allow", "prefer", "require", "verify-ca"})  # Every sslmode but verify-full.
_FALSE = frozenset({"false", "f", "0"})  # As librdkafka reads it.
_logged: set[str] = set()  # The warnings that this process has given.
_HOST_OF_BROKER = re.compile(r"(?:\w+://)?(?:\[(?P<ipv6>[^\]]*)\]|(?P<host>[^:/]*))(?::\d+)?")


def warn_about_insecure_settings(settings: Settings, *, postgres: bool = True) -> None:
    """Log a warning for each insecure setting, once in a process: tenants' harvesters start again and again.

    Args:
        settings: name the servers, and how to connect to them.
        postgres: whether connections to Postgres will be made.
    """
    found = [
        *insecure_kafka_settings(settings),
        *(insecure_postgres_settings(settings, os.environ) if postgres else ()),
    ]
    for weakness in found:
        if weakness not in _logged:
            _logged.add(weakness)
            logger.warning("%s", weakness)


def insecure_kafka_settings(settings: Settings) -> Iterator[str]:
    """The insecure settings of connections to Kafka, one line each."""
    kafka = {name: str(value).strip().lower() for name, value in settings.kafka.items()}
    if kafka.get("enable.ssl.certificate.verification") in _FALSE:
        yield (
            "OUTBOX_KAFKA: enable.ssl.certificate.verification=false: somebody on the network path to Kafka can "
            "impersonate a broker; name the brokers' certificate authority in ssl.ca.location instead"
        )
    if kafka.get("ssl.endpoint.identification.algorithm") == "none":
        yield (
            "OUTBOX_KAFKA: ssl.endpoint.identification.algorithm=none: anybody with a certificate of the same "
            "authority can impersonate a broker; the default, https, compares the broker's name"
        )
    endpoint = _HOST_OF_BROKER.match(kafka.get("sasl.oauthbearer.token.endpoint.url", ""))
    if endpoint and endpoint[0].startswith("http://") and not _is_local(endpoint["ipv6"] or endpoint["host"]):
        yield (
            "OUTBOX_KAFKA: sasl.oauthbearer.token.endpoint.url=http://…, and a server that is not on this machine: "
            "whoever stands in between can read the client's secret and its tokens; name an https:// address"
        )
    if kafka.get("security.protocol") == "sasl_plaintext" and not _are_local(_hosts_of(settings.bootstrap_servers)):
        yield (
            "OUTBOX_KAFKA: security.protocol=SASL_PLAINTEXT, and a broker that is not on this machine: somebody on the "
            "network path to Kafka can read the events, and the password or a hash to guess it from; set SASL_SSL"
        )


def insecure_postgres_settings(settings: Settings, environment: Mapping[str, str]) -> Iterator[str]:
    """The insecure settings of connections to Postgres, one line each.

    Of the DSN, a line shows only the sslmode.

    Args:
        settings: with the DSN.
        environment: the variables from which libpq takes parameters that the DSN lacks.
    """
    if mode := _unverified_mode(settings.dsn.get_secret_value(), environment):
        yield (
            f"OUTBOX_DSN: sslmode={mode}, with a password, and a server that is not on this machine: somebody on the "
            "network path can impersonate the server, and read the password or the data; set sslmode=verify-full"
        )


def _unverified_mode(dsn: str, environment: Mapping[str, str]) -> str | None:
    """The sslmode, if it sends a password to another machine without verifying that machine's identity; else None."""
    from psycopg.conninfo import conninfo_to_dict  # Imported here, so that consumers without Postgres need no driver.

    given = conninfo_to_dict(dsn)

    def option(name: str) -> str:
        return str(given.get(name) or environment.get(f"PG{name.replace('_', '').upper()}") or "")

    if option("sslrootcert") == "system":  # With it, libpq refuses every sslmode weaker than verify-full.
        return None
    if option("channel_binding") == "require":  # SCRAM then proves that the server knows the password.
        return None
    mode = option("sslmode") or "prefer"
    hosts = (option("hostaddr") or option("host")).split(",")
    passfile = option("passfile") or str(Path(environment.get("HOME", os.devnull)) / ".pgpass")
    has_password = bool(option("password")) or _names_a_host(passfile, [*option("host").split(","), *hosts])
    return mode if has_password and mode in _NOT_VERIFIED and not _are_local(hosts) else None


def _names_a_host(passfile: str, hosts: Sequence[str]) -> bool:
    """Whether libpq's password file has a line for one of the hosts, or for any host. Other fields are not compared."""
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
    """Whether each host is this machine: the path of a socket, or a loopback address."""
    return all(map(_is_local, hosts))


def _is_local(host: str) -> bool:
    host = host.strip()
    if not host or host[0] in "/@" or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
