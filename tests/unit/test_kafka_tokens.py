"""What a token provider returns or raises is judged and said in one line, and no secret is in it."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from outbox_plugin.adapters import kafka_tokens
from outbox_plugin.adapters.kafka_clients import check_properties, client_config
from outbox_plugin.adapters.kafka_tokens import TokenCallback, TokenProvider, token_provider
from outbox_plugin.errors import InvalidSetting, LogUnavailable, ServerRefused
from outbox_plugin.inbox import Inbox, consumer
from outbox_plugin.inbox.positions import Positions
from outbox_plugin.settings import Settings
from outbox_plugin.threads import calls_with_deadline
from tests.clock import SimulatedTime
from tests.support import PATIENCE
from tests.token_issuer import BY_FUNCTION

SECRET = "eyJhbGciOi.s3cret"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the module `shop_tokens`, which can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shop_tokens", raising=False)
    token_provider.cache_clear()
    return tmp_path / "shop_tokens.py"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (SECRET, "returns str; expected a token, and the seconds since the epoch"),
        ((SECRET, 1, 2), "returns tuple"),
        ((SECRET.encode(), time.time() + 9), "returns a token that is no text"),
        (("", time.time() + 9), "returns a token that is no text"),
        ((f"{SECRET}\n", time.time() + 9), "returns a token that is no text"),
        ((SECRET, "tomorrow"), "returns str for the time of expiry"),
        ((SECRET, True), "returns bool for the time of expiry"),
        ((SECRET, time.time() - 1), "returns a token that has expired"),
        ((SECRET, float("nan")), "returns a token that has expired"),
        ((SECRET, (time.time() + 900) * 1000), "returns a token that expires in more than ten years"),
        ((SECRET, float("inf")), "returns a token that expires in more than ten years"),
    ],
)
def test_what_is_no_token_is_said_without_it(answer: object, said: str) -> None:
    with pytest.raises(LogUnavailable) as caught:
        TokenCallback(TokenProvider("setting", lambda: answer))
    assert str(caught.value).startswith(f"setting {said}")
    assert SECRET not in str(caught.value)


def test_the_first_token_is_asked_for_at_once_and_another_one_each_time() -> None:
    tokens = iter([("a", time.time() + 900), ("b", time.time() + 900)])
    provider = TokenProvider("setting", lambda: next(tokens))
    callback = TokenCallback(provider)
    assert [callback("")[0], callback("")[0]] == ["a", "b"]


def test_a_first_token_that_has_expired_meanwhile_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_tokens, "time", clock := SimulatedTime())
    tokens = iter([("a", clock.time() + 60), ("b", clock.time() + 900)])
    callback = TokenCallback(TokenProvider("setting", lambda: next(tokens)))
    clock.sleep(61)
    assert callback("")[0] == "b"


@pytest.mark.parametrize("raised", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_what_it_raises_is_said_without_its_text(raised: type[BaseException]) -> None:
    def function() -> None:
        raise raised(SECRET)

    with pytest.raises(LogUnavailable, match=f"setting raises {raised.__name__}") as caught:
        TokenCallback(TokenProvider("setting", function))
    assert SECRET not in str(caught.value)


def test_that_it_fails_is_logged_once_and_that_it_works_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fails = [True]

    def function() -> tuple[str, float]:
        if fails[0]:
            raise ConnectionError(f"https://id.example/?secret={SECRET}")
        return SECRET, time.time() + 900

    provider = TokenProvider("setting", function)
    for _ in range(3):
        with pytest.raises(LogUnavailable):
            provider.next_token(provider.calls())
    with pytest.raises(LogUnavailable):
        TokenCallback(provider)  # Whoever makes the client tells of it.
    fails[0] = False
    provider.next_token(provider.calls())
    first, second = (record.getMessage() for record in caplog.records)
    assert "setting raises ConnectionError (test_kafka_tokens.py:" in first
    assert second == "setting returns tokens again"
    assert SECRET not in caplog.text


@contextmanager
def answers_awaited(seconds: float) -> Iterator[None]:
    """An answer is awaited for so long. Only where none comes: what answers may need longer on a slow machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kafka_tokens, "ANSWER_SECONDS", seconds)
        yield


def test_one_that_does_not_return_is_not_waited_for() -> None:
    release = Event()

    def function() -> tuple[str, float]:
        release.wait()
        return "late", time.time() + 900

    with answers_awaited(0.1), pytest.raises(LogUnavailable, match="setting did not answer within"):
        TokenCallback(TokenProvider("setting", function))
    release.set()


def test_calls_that_never_return_keep_nobody_from_asking_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a library without a time-out, whose server is gone while another one answers."""
    monkeypatch.setattr(calls_with_deadline, "time", clock := SimulatedTime())
    answers, release = Event(), Event()

    def function() -> tuple[str, float]:
        if not answers.is_set():
            release.wait()
        return "token", time.time() + 900

    provider = TokenProvider("setting", function)
    calls = provider.calls()
    for _ in range(2):
        with answers_awaited(0.05), pytest.raises(LogUnavailable, match="did not answer within"):
            provider.next_token(calls)
    clock.sleep(kafka_tokens._FORGOTTEN_AFTER_SECONDS - 1)
    with pytest.raises(LogUnavailable, match="has not answered 2 earlier calls"):
        provider.next_token(calls)
    clock.sleep(2)
    answers.set()
    assert provider.next_token(calls)[0] == "token"
    release.set()


def test_a_client_can_be_closed_while_its_next_token_does_not_come(caplog: pytest.LogCaptureFixture) -> None:
    """librdkafka waits for the callback then, for as long as that takes."""
    asked, release = Event(), Event()

    def function() -> tuple[str, float]:
        if len(answered) == 1:
            asked.set()
            release.wait(10 * PATIENCE)
        answered.append(time.time() + 2)
        return "token", answered[-1]

    answered: list[float] = []
    callback = TokenCallback(TokenProvider("setting", function))
    config: dict[str, Any] = {"bootstrap.servers": "127.0.0.1:1", **BY_FUNCTION, "oauth_cb": callback}
    with answers_awaited(0.1):
        client = AdminClient(config)
        assert asked.wait(20 * PATIENCE)
        client.__exit__(None, None, None)
    assert len(answered) == 1
    release.set()
    assert "setting did not answer within" in caplog.text


def test_calls_that_never_return_keep_few_threads_and_no_token_from_new_clients() -> None:
    """As where the server of tokens was cut off, and the function has no time-out."""
    hangs, release, asked = Event(), Event(), list[bool]()

    def function() -> tuple[str, float]:
        asked.append(True)
        if hangs.is_set():
            release.wait()
        return "token", time.time() + 900

    provider = TokenProvider("setting", function)
    client = TokenCallback(provider)
    assert client("")[0] == "token"
    hangs.set()
    for _ in range(5):
        with answers_awaited(0.1), pytest.raises(LogUnavailable):
            client("")
    assert len(asked) == 3
    hangs.clear()
    assert TokenCallback(provider)("")[0] == "token"
    release.set()


def test_an_inbox_that_gets_no_token_once_the_servers_were_checked_does_not_start(
    monkeypatch: pytest.MonkeyPatch, module: Path
) -> None:
    module.write_text("def token(): raise OSError")
    tokens: dict[str, Any] = {"kafka": BY_FUNCTION, "kafka_token_provider": "shop_tokens:token"}
    settings = Settings(dsn="postgresql://nowhere/none", bootstrap_servers="127.0.0.1:1", **tokens)
    monkeypatch.setattr(consumer, "check_servers", lambda *_: (settings, Positions(settings, "g")))
    with pytest.raises(ServerRefused, match="shop_tokens:token raises OSError"):
        Inbox(settings, group="g", topics=["t"], handler=lambda connection, event: None).start()


def test_properties_are_checked_without_a_token() -> None:
    """A server of tokens that does not answer would keep whoever checks, and the client's end, for long."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(1.0)
        oidc = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": "shop",
            "sasl.oauthbearer.client.secret": SECRET,
            "sasl.oauthbearer.token.endpoint.url": f"http://127.0.0.1:{server.getsockname()[1]}/token",
        }
        check_properties(Settings(dsn="postgresql://nowhere", bootstrap_servers="127.0.0.1:1", kafka=oidc))
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("", "no_such_module:token", "cannot be imported: No module named 'no_such_module'"),
        ("", "shop_tokens:token", "cannot be imported: module 'shop_tokens' has no attribute 'token'"),
        ("token = 5", "shop_tokens:token", "is no function"),
        ("import os; raise ValueError('s3cret')", "shop_tokens:token", "it raises ValueError (shop_tokens.py:1)"),
        ("import sys; sys.exit('s3cret')", "shop_tokens:token", "it raises SystemExit (shop_tokens.py:1)"),
        ("def token(", "shop_tokens:token", "cannot be imported: it raises SyntaxError"),
    ],
)
def test_a_provider_that_is_not_there_is_one_line(module: Path, text: str, name: str, said: str) -> None:
    module.write_text(text)
    with pytest.raises(InvalidSetting) as caught:
        token_provider(name)
    assert str(caught.value).startswith(f"OUTBOX_KAFKA_TOKEN_PROVIDER: {name} ")
    assert said in str(caught.value)
    assert str(caught.value).isprintable()
    assert "s3cret" not in str(caught.value)


def test_each_client_has_a_token_of_its_own(module: Path) -> None:
    module.write_text(f"import time\nclass Issuer:\n  token = lambda: ({SECRET!r}, time.time() + 900)\n")
    settings = Settings(
        dsn="postgresql://nowhere",
        bootstrap_servers="127.0.0.1:1",
        kafka={"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"},
        kafka_token_provider="shop_tokens:Issuer.token",
    )
    callbacks = [client_config(settings)["oauth_cb"] for _ in range(2)]
    assert callbacks[0] is not callbacks[1]
    assert callbacks[0]("")[0] == SECRET
    assert "oauth_cb" not in client_config(settings.model_copy(update={"kafka_token_provider": None}))
