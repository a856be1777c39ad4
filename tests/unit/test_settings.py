"""Settings: what is right is taken, what is wrong is said in one line, and secrets stay secret."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_plugin.errors import InvalidSetting
from outbox_plugin.kafka_settings import kafka_settings
from outbox_plugin.settings import LogSettings, Settings

DSN = "postgresql://app:s3cret@db:5432/shop"
RIGHT: dict[str, Any] = {"dsn": DSN, "bootstrap_servers": "kafka:9092"}
OAUTHBEARER = {"security.protocol": "SASL_SSL", "sasl.mechanisms": "OAUTHBEARER"}
OIDC = {**OAUTHBEARER, "sasl.oauthbearer.method": "OIDC", "sasl.oauthbearer.client.secret": "s3cret"}


def test_defaults() -> None:
    settings = Settings(**RIGHT)
    assert (settings.table, settings.group, settings.delivery, settings.shards) == (
        "outbox",
        "outbox",
        "exactly-once",
        1,
    )


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_DSN", DSN)
    monkeypatch.setenv("OUTBOX_BOOTSTRAP_SERVERS", "kafka:9092")
    monkeypatch.setenv(
        "OUTBOX_KAFKA", '{"security.protocol": "SSL", "linger.ms": 5, "enable.ssl.certificate.verification": true}'
    )
    assert Settings().kafka == {
        "security.protocol": "SSL",
        "linger.ms": "5",
        "enable.ssl.certificate.verification": "true",
    }


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bootstrap_servers": "kafka:abc"}, "OUTBOX_BOOTSTRAP_SERVERS: expected brokers as host:port, with commas"),
        ({"bootstrap_servers": "kafka:9092,:"}, "OUTBOX_BOOTSTRAP_SERVERS: expected brokers as host:port, with commas"),
        ({"bootstrap_servers": " , "}, "OUTBOX_BOOTSTRAP_SERVERS: expected brokers as host:port, with commas"),
        ({"bootstrap_servers": "kafka:70000"}, "OUTBOX_BOOTSTRAP_SERVERS: expected brokers as host:port, with commas"),
        ({"dsn": "db:5432/shop"}, "OUTBOX_DSN: not a Postgres URI; expected postgresql://"),
        ({"dsn": "postgresql://app:s3cret@db:port/shop?x"}, "OUTBOX_DSN: not a Postgres URI"),
        ({"bootstrap_servers": ""}, "OUTBOX_BOOTSTRAP_SERVERS: expected brokers as host:port, with commas"),
        ({"dsn": ""}, "OUTBOX_DSN: it is empty; expected postgresql://"),
        ({"dsn": " "}, "OUTBOX_DSN: it is empty; expected postgresql://"),
        ({"delivery": "twice"}, "OUTBOX_DELIVERY: Input should be 'exactly-once' or 'at-least-once' (given: 'twice')"),
        ({"shards": 0}, "OUTBOX_SHARDS: Input should be greater than or equal to 1 (given: 0)"),
        ({"shards": "many"}, "OUTBOX_SHARDS"),
        ({"table": "out box"}, "OUTBOX_TABLE: expected a table name"),
        ({"table": "a.b.c"}, "OUTBOX_TABLE: expected a table name"),
        ({"table": "pg_temp.outbox"}, "OUTBOX_TABLE: expected another schema"),
        ({"table": "information_schema.outbox"}, "OUTBOX_TABLE: expected another schema"),
        ({"group": "a/b"}, "OUTBOX_GROUP: expected 1 to 200 letters"),
        ({"kafka": "linger.ms=5"}, "OUTBOX_KAFKA: expected a JSON object"),
        ({"kafka": {"acks": "1"}}, "OUTBOX_KAFKA: the property 'acks' cannot be set here"),
        ({"kafka": {"transactional.id": "x"}}, "it belongs to OUTBOX_GROUP"),
        ({"tenants_rest": "inf"}, "OUTBOX_TENANTS_REST: "),
        ({"kafka_token_provider": "shop.tokens"}, "OUTBOX_KAFKA_TOKEN_PROVIDER: expected a function of a"),
        ({"kafka_token_provider": "eyJ.s3cret.x"}, "OUTBOX_KAFKA_TOKEN_PROVIDER: expected a function of a"),
        ({"dsn": "postgresql://app:a@s3cret@db/shop"}, "OUTBOX_DSN: an @ or a / in the user or the password"),
        ({"dsn": "postgresql://app:a@s3cret@db"}, "OUTBOX_DSN: an @ or a / in the user or the password"),
        ({"dsn": "postgresql://app:1/s3cret@db/shop"}, "OUTBOX_DSN: an @ or a / in the user or the password"),
        ({"dsn": "postgresql://app:s3cret/shop"}, "OUTBOX_DSN: the port is no number"),
        ({"dsn": "postgresql://app:x@db:s3cret/shop"}, "OUTBOX_DSN: the port is no number"),
        ({"kafka_token_provider": "shop:token"}, "OUTBOX_KAFKA_TOKEN_PROVIDER: tokens are for OUTBOX_KAFKA with secur"),
        ({"kafka_token_provider": "shop:token", "kafka": {"sasl.mechanism": "OAUTHBEARER"}}, "security.protocol=SASL_"),
        ({"kafka_token_provider": "shop:token", "kafka": OIDC}, "sasl.oauthbearer.method=oidc, another source"),
        ({"kafka": {**OAUTHBEARER, "sasl.oauthbearer.method": "default"}}, "OUTBOX_KAFKA: sasl.mechanism=OAUTHBEARER"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        Settings(**{**RIGHT, **wrong})
    message = str(caught.value)
    assert said in message
    assert "\n" not in message
    assert "s3cret" not in message


@pytest.mark.parametrize(
    "right",
    [
        {"kafka": OIDC},
        {"kafka": OAUTHBEARER, "kafka_token_provider": "shop.tokens:Issuer.token"},
        {"kafka": {**OAUTHBEARER, "enable.sasl.oauthbearer.unsecure.jwt": True}},
    ],
)
def test_tokens_of_one_source_are_taken(right: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(**RIGHT, **right)
    for name, text in settings.environment().items():
        monkeypatch.setenv(name, text)
    assert Settings() == settings


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://app:s3%40cret@db:5432/shop",
        "postgresql://app:s3%2Fcret@db/shop?options=-c%20a%3Db@c/d",
        "postgresql://app:s3?c#r:e[t@db/shop",
        "postgresql://a:1,b:2/shop",
        "postgresql://app@/shop?host=/run/postgresql",
        "postgresql://%2Frun%2Fpostgresql/shop?user=a@b",
        "postgresql:///shop?user=a@b",
        "postgresql://db?user=a@b",
        "host=db user=a@b password='x/y@z' port=5432",
        "postgres://app@[::1]:5432/shop",
    ],
)
def test_a_dsn_that_libpq_reads_as_it_is_meant_is_taken(dsn: str) -> None:
    assert Settings(**{**RIGHT, "dsn": dsn}).dsn.get_secret_value() == dsn


def test_a_missing_setting_says_what_it_is_for() -> None:
    with pytest.raises(InvalidSetting, match="OUTBOX_DSN is not set: Postgres URI"):
        Settings(bootstrap_servers="kafka:9092")


def test_an_empty_dsn_is_fine_for_one_who_needs_no_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_DSN", "")
    assert kafka_settings("kafka:9092", None).bootstrap_servers == "kafka:9092"


def test_json_that_is_none_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_KAFKA", "{not json")
    with pytest.raises(InvalidSetting) as caught:
        Settings(**RIGHT)
    assert str(caught.value) == "OUTBOX_KAFKA: expected JSON"


def test_secrets_are_never_shown() -> None:
    settings = Settings(**RIGHT, kafka={"sasl.password": "hunter2"})
    shown = f"{settings!r} {settings}"
    assert "s3cret" not in shown
    assert "hunter2" not in shown


def test_a_process_gets_the_same_settings_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(
        **RIGHT, retention="7d", shards=3, kafka={"linger.ms": "5"}, outboxes=[{"group": "a"}, {"group": "b"}]
    )
    for name, text in settings.environment().items():
        monkeypatch.setenv(name, text)
    assert Settings() == settings


@pytest.mark.parametrize("level", ["info", "Info", "INFO"])
def test_a_log_level_may_be_written_in_any_case(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_LOG_LEVEL", level)
    assert LogSettings().log_level == "INFO"


@pytest.mark.parametrize(
    "brokers",
    ["kafka", "kafka:9092", "SASL_SSL://b-1.x:9096, b_2:9096,", "[::1]:9092", "fe80::1", "PLAINTEXT://k:09092/"],
)
def test_brokers_as_the_client_takes_them(brokers: str) -> None:
    assert Settings(dsn="postgresql://app@db/shop", bootstrap_servers=brokers).bootstrap_servers == brokers
