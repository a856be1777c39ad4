"""What weakens a connection is said when something starts, in one line each, and without a secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_plugin import Harvester, Settings, coordination, insecure_settings
from outbox_plugin.adapters import kafka_admin
from outbox_plugin.errors import ServerRefused
from outbox_plugin.inbox import Inbox, Received
from outbox_plugin.insecure_settings import insecure_kafka_settings, insecure_postgres_settings

NOTHING: dict[str, str] = {}


def found(dsn: str = "postgresql://db/shop", environment: dict[str, str] = NOTHING, **kafka: str) -> list[str]:
    named = {name.replace("_", "."): value for name, value in kafka.items()}
    settings = Settings(dsn=dsn, bootstrap_servers="k:1", kafka=named)
    return [*insecure_kafka_settings(settings), *insecure_postgres_settings(settings, environment)]


@pytest.mark.parametrize("mode", ["disable", "allow", "prefer", "require", "verify-ca", None])
def test_a_password_for_a_server_that_nobody_verifies(mode: str | None) -> None:
    [said] = found("postgresql://app:hunter2@db/shop" + (f"?sslmode={mode}" if mode else ""))
    assert said.startswith(f"OUTBOX_DSN: sslmode={mode or 'prefer'}, ")
    assert said.isprintable()
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://app:hunter2@db/shop?sslmode=verify-full",
        "postgresql://app@db/shop",
        "postgresql://app:hunter2@localhost/shop",
        "postgresql://app:hunter2@127.0.0.53:5433/shop",
        "postgresql://app:hunter2@[::1]/shop",
        "postgresql://app:hunter2@/shop?host=/run/postgresql",
        "postgresql://app:hunter2@/shop",
        "postgresql://app:hunter2@localhost,127.0.0.1/shop",
        "host=db hostaddr=127.0.0.1 password=hunter2",
        "postgresql://app:hunter2@db/shop?sslrootcert=system",
        "postgresql://app:hunter2@db/shop?channel_binding=require",
        "postgresql://app@db/shop?passfile=/nowhere",
    ],
)
def test_what_needs_no_warning(dsn: str) -> None:
    assert found(dsn) == []


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://app:hunter2@localhost,db/shop",
        "host=localhost hostaddr=10.0.0.1 password=hunter2",
        "postgresql://app:hunter2@[fe80::1]/shop",
    ],
)
def test_a_server_elsewhere_however_it_is_named(dsn: str) -> None:
    [said] = found(dsn)
    assert "ter2" not in said


def test_libpqs_environment_counts_where_the_dsn_says_nothing() -> None:
    with_password = "postgresql://app:hunter2@db/shop"
    assert found(with_password, {"PGSSLMODE": "verify-full"}) == []
    assert found(with_password + "?sslmode=require", {"PGSSLMODE": "verify-full"}) != []
    assert found("postgresql://app@/shop", {"PGHOST": "db", "PGPASSWORD": "hunter2"}) != []
    assert found("postgresql://app@/shop", {"PGHOST": "/run/postgresql", "PGPASSWORD": "hunter2"}) == []


@pytest.mark.parametrize(
    ("line", "weak"), [("db:*:*:app:hunter2", True), ("*:*:*:*:x", True), ("other:*:*:*:x", False)]
)
def test_a_password_of_a_file_is_a_password(tmp_path: Path, line: str, weak: bool) -> None:
    passfile = tmp_path / ".pgpass"
    passfile.write_text(f"# db:*:*:*:x\n{line}\n")
    for dsn, environment in (
        (f"postgresql://app@db/shop?passfile={passfile}", NOTHING),
        ("postgresql://app@db/shop", {"PGPASSFILE": str(passfile)}),
        ("postgresql://app@db/shop", {"HOME": str(tmp_path)}),
    ):
        assert len(found(dsn, environment)) == weak
        assert found(dsn.replace("db", "localhost", 1), environment) == []
        assert found(dsn, {**environment, "PGCHANNELBINDING": "require"}) == []


@pytest.mark.parametrize(
    ("brokers", "weak"),
    [
        ("kafka:9092", True),
        ("localhost:9092,SASL_PLAINTEXT://10.0.0.7:9092", True),
        ("[fe80::1]:9092", True),
        ("localhost:9092,127.0.0.1,[::1]:9092", False),
    ],
)
def test_a_password_for_a_broker_without_tls(brokers: str, weak: bool) -> None:
    def lines(protocol: str) -> list[str]:
        kafka = {"security.protocol": protocol}
        return list(
            insecure_kafka_settings(Settings(dsn="postgresql://db/shop", bootstrap_servers=brokers, kafka=kafka))
        )

    assert ["SASL_PLAINTEXT" in line for line in lines("sasl_plaintext")] == ([True] if weak else [])
    assert lines("SASL_SSL") == lines("plaintext") == []


@pytest.mark.parametrize("value", ["false", "False", "0", "f"])
def test_a_broker_whose_certificate_nobody_verifies(value: str) -> None:
    [said] = found(enable_ssl_certificate_verification=value)
    assert "enable.ssl.certificate.verification=false" in said
    assert found(enable_ssl_certificate_verification="true") == []


def test_a_broker_whose_name_nobody_compares() -> None:
    [said] = found(ssl_endpoint_identification_algorithm="none")
    assert "ssl.endpoint.identification.algorithm=none" in said
    assert found(ssl_endpoint_identification_algorithm="https") == []


def handle(connection: psycopg.Connection[Any], event: Received) -> None:
    """Nothing is consumed here."""


STARTS: dict[str, Callable[[Settings], object]] = {
    "harvester": lambda settings: Harvester(settings).start(),
    "inbox": lambda settings: Inbox(settings, group="g", topics=["t"], handler=handle).start(),
    "consumer": lambda settings: coordination.Consumer(
        ["t"], "g", "c", bootstrap_servers=settings.bootstrap_servers, kafka=settings.kafka
    ),
}


@pytest.mark.parametrize("what", STARTS)
def test_each_is_one_line_when_something_starts(
    what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer needs no Postgres, whatever its environment says of one."""
    dsn = "postgresql://app:hunter2@192.0.2.1/x"
    monkeypatch.setenv("OUTBOX_DSN", dsn)
    monkeypatch.setattr(insecure_settings, "_logged", set())
    monkeypatch.setattr(kafka_admin, "REACH_SECONDS", 0.5)  # How long it looks for a broker that is not there.
    kafka = {
        "enable.ssl.certificate.verification": "false",
        "ssl.endpoint.identification.algorithm": "none",
        "sasl.password": "hunter3",
    }
    for _ in range(2):  # The second one has nothing new to say.
        with pytest.raises(ServerRefused):
            STARTS[what](Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1", kafka=kafka))
    warned = [each.getMessage() for each in caplog.records if each.name == "outbox_plugin.settings"]
    assert len(warned) == (2 if what == "consumer" else 3)
    assert "hunter" not in caplog.text


@pytest.mark.parametrize(
    ("address", "weak"),
    [
        ("http://id.example/token?client=s3cret", True),
        ("HTTP://10.0.0.7:8080/token", True),
        ("https://id.example/token", False),
        ("http://127.0.0.1:8080/token", False),
        ("http://localhost/token", False),
    ],
)
def test_a_token_endpoint_without_tls(address: str, weak: bool) -> None:
    said = found(sasl_oauthbearer_token_endpoint_url=address)
    assert ["token.endpoint" in line for line in said] == ([True] if weak else [])
    assert "s3cret" not in "".join(said)
