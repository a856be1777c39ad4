"""On a Kafka that lets in who has a token, all our clients have one, and fresh ones before it expires."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from outbox_plugin import Harvester, Settings, coordination
from outbox_plugin.coordination.admin import Admin
from outbox_plugin.inbox import Inbox
from outbox_plugin.status.reader import read_status
from outbox_plugin.verification.topic_reader import records_in, verify_topic
from tests.harvesting import (
    assert_exactly_once_in_order,
    consume,
    create_topic,
    drained,
    environment,
    insert_numbered,
    run_outbox,
)
from tests.inbox_support import effects, make_effect_table, record_effect
from tests.processes import launched
from tests.support import eventually
from tests.token_issuer import BY_FUNCTION, CLIENT_ID, CLIENT_SECRET, ISSUER, TokenKafka

pytestmark = pytest.mark.integration

PROVIDER = "tests.token_issuer:ISSUER.token"


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenKafka]:
    kafka = TokenKafka(tmp_path_factory.mktemp("tokens"), print)
    with launched(kafka):
        yield kafka


@pytest.fixture
def trusted(settings: Settings, kafka: TokenKafka) -> Settings:
    """The outbox, for a client that needs no token."""
    return settings.model_copy(update={"bootstrap_servers": kafka.internal})


@pytest.fixture
def topic(trusted: Settings, group: str) -> str:
    return create_topic(trusted, f"{group}-events")


@pytest.fixture
def issued() -> Iterator[list[str]]:
    """The tokens that are issued during the test."""
    ISSUER.issued.clear()
    yield ISSUER.issued
    ISSUER.fails = False


@pytest.fixture
def by_function(settings: Settings, kafka: TokenKafka, issued: list[str]) -> Settings:
    known = {"bootstrap_servers": kafka.bootstrap_servers, "kafka": BY_FUNCTION, "kafka_token_provider": PROVIDER}
    return settings.model_copy(update=known)


@pytest.fixture
def by_oidc(settings: Settings, kafka: TokenKafka, issued: list[str]) -> Iterator[Settings]:
    with ISSUER.endpoint() as address:
        oidc = {
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": CLIENT_ID,
            "sasl.oauthbearer.client.secret": CLIENT_SECRET,
            "sasl.oauthbearer.token.endpoint.url": address,
        }
        known = {"bootstrap_servers": kafka.bootstrap_servers, "kafka": {**BY_FUNCTION, **oidc}}
        yield settings.model_copy(update=known)


@pytest.fixture(params=["by_function", "by_oidc"])
def login(request: pytest.FixtureRequest) -> Settings:
    found: Settings = request.getfixturevalue(request.param)
    return found


def assert_no_secret_in(text: str) -> None:
    assert not [token for token in ISSUER.issued if token in text]
    assert CLIENT_SECRET not in text


def test_a_harvester_outlives_its_tokens(
    login: Settings, trusted: Settings, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    insert_numbered(trusted, topic, 1, 100)
    with Harvester(login):
        drained(trusted)
        at_first = len(ISSUER.issued)
        assert at_first >= 4
        eventually(lambda: len(ISSUER.issued) > 3 * at_first, 60)  # Each client has its third token.
        insert_numbered(trusted, topic, 101, 100)
        drained(trusted)
        eventually(lambda: read_status(login, 20).shards[0].leader, 30)
    assert_exactly_once_in_order(consume(trusted, topic), 1, 200)
    assert_no_secret_in(caplog.text)


def test_a_provider_that_fails_is_one_line_and_the_harvester_goes_on_when_it_works_again(
    by_function: Settings, trusted: Settings, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connections end meanwhile."""
    caplog.set_level(logging.INFO)
    insert_numbered(trusted, topic, 1, 100)
    with Harvester(by_function) as harvester:
        drained(trusted)
        ISSUER.fails = True
        eventually(lambda: "no new token" in caplog.text, 60)
        eventually(lambda: not read_leader(by_function, trusted), 60)
        insert_numbered(trusted, topic, 101, 100)
        ISSUER.fails = False
        drained(trusted)
        assert harvester.error is None
    assert_exactly_once_in_order(consume(trusted, topic), 1, 200)
    said = [record.getMessage() for record in caplog.records if "no new token" in record.getMessage()]
    assert len(said) == 1
    assert f"OUTBOX_KAFKA_TOKEN_PROVIDER: {PROVIDER} raises PermissionError (token_issuer.py:" in said[0]
    assert "returns tokens again" in caplog.text
    assert_no_secret_in(caplog.text)


def read_leader(by_function: Settings, trusted: Settings) -> bool:
    """Whether somebody is heard to lead. The tokens of who leads are not needed to see that."""
    status = read_status(trusted.model_copy(update={"group": by_function.group}), 20)
    return status.shards[0].leader is not None


def test_every_reader_has_a_token(login: Settings, trusted: Settings, topic: str, group: str) -> None:
    make_effect_table(trusted)
    insert_numbered(trusted, topic, 1, 100)
    with Harvester(login), Inbox(login, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: len(effects(trusted)) == 100, 60)
    assert verify_topic(login, topic).records == 100
    assert records_in(login, [topic]) >= 100


def test_coordinated_consumers_have_tokens(
    by_function: Settings, trusted: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOX_KAFKA_TOKEN_PROVIDER", PROVIDER)
    insert_numbered(trusted, topic, 1, 10)
    with Harvester(trusted):
        drained(trusted)
    reached: dict[str, Any] = {"bootstrap_servers": by_function.bootstrap_servers, "kafka": BY_FUNCTION}
    marshal = f"{group}-marshal"
    with coordination.Consumer([topic], group, "one", coordination_topic=marshal, **reached) as consumer:
        read: set[int] = set()

        def has_read_all() -> bool:
            if (message := consumer.poll(0.1)) is not None:
                read.add(int(str((message.value() or b"").decode())))
            return len(read) == 10

        eventually(has_read_all, 60)
    assert Admin(coordination_topic=marshal, **reached).world(group).rows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be imported: module 'relay_tokens' has no attribute 'token'"),
        ("token = 'tok3n'", "is no function"),
        ("def token(): return 'tok3n'", "returns str; expected a token, and the seconds since the epoch"),
        ("def token(): return 'tok3n', 5", "returns a token that has expired"),
        ("def token(): raise OSError('tok3n')", "raises OSError (relay_tokens.py:1)"),
    ],
)
def test_a_wrong_provider_ends_a_harvester_in_one_line(
    by_function: Settings, tmp_path: Path, text: str, said: str
) -> None:
    ends_in_one_line(by_function, tmp_path, text, said)


@pytest.mark.parametrize("command", [("verify", "orders"), ("consumers", "list")], ids=lambda each: each[0])
def test_a_provider_that_fails_ends_other_commands_in_one_line(
    by_function: Settings, tmp_path: Path, command: Sequence[str]
) -> None:
    in_json = by_function.model_copy(update={"log_format": "json"})
    said = "raises OSError (relay_tokens.py:1)"
    ends_in_one_line(in_json, tmp_path, "def token(): raise OSError('tok3n')", said, command)


def ends_in_one_line(
    settings: Settings, folder: Path, text: str, said: str, command: Sequence[str] = ("harvest",)
) -> None:
    (folder / "relay_tokens.py").write_text(text)
    wrong = settings.model_copy(update={"kafka_token_provider": "relay_tokens:token"})
    ended = run_outbox(*command, env={**environment(wrong), "PYTHONPATH": str(folder)})
    assert ended.returncode == 2, ended.stderr
    [line] = ended.stderr.splitlines()
    assert said in line
    assert "tok3n" not in ended.stderr + ended.stdout


def test_an_oidc_server_that_refuses_ends_the_start_in_one_line(by_oidc: Settings) -> None:
    ISSUER.fails = True
    ended = run_outbox("harvest", env=environment(by_oidc))
    assert ended.returncode == 2, ended.stderr
    [line] = ended.stderr.splitlines()
    assert "token: " in line
    assert "invalid_client" in line
    assert_no_secret_in(ended.stderr)
