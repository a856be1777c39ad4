"""What a consumer cannot be asked for, said in one line before anything is connected."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_plugin.coordination import Admin, Consumer
from outbox_plugin.errors import InvalidSetting, ServerRefused, UserError
from tests.harvesting import run_outbox

GIVEN: dict[str, Any] = {
    "topics": ["orders"],
    "group_id": "billing",
    "client_id": "one",
    "bootstrap_servers": "127.0.0.1:1",
}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"topics": "orders"}, "topics: expected a list of topic names"),
        ({"topics": []}, "topics: expected a list of topic names"),
        ({"guarantee": "exactly-once"}, "guarantee: expected at-least-once or at-most-once"),
        ({"max_claims": 0}, "max_claims: expected 1 or more"),
        ({"heartbeat_interval_seconds": 0.5}, "heartbeat_interval_seconds: expected 1 or more"),
        ({"heartbeat_interval_seconds": float("nan")}, "heartbeat_interval_seconds: expected 1 or more"),
        ({"client_id": "a/b"}, "client_id: contains `/`"),
        ({"client_id": ""}, "client_id: is empty"),
        ({"group_id": ""}, "group_id: is empty"),
        ({"topics": ["a/b"]}, "topic: contains `/`"),
    ],
)
def test_a_wrong_argument_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        Consumer(**{**GIVEN, **wrong})
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_brokers_are_needed() -> None:
    with pytest.raises(InvalidSetting, match="OUTBOX_BOOTSTRAP_SERVERS is not set"):
        Admin()


def test_a_property_that_the_promise_rests_on_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"enable\.auto\.commit"):
        Consumer(**GIVEN, kafka={"enable.auto.commit": "true"})


def test_a_broker_that_does_not_answer_is_named() -> None:
    with pytest.raises(ServerRefused, match=r"127\.0\.0\.1:1"):
        Consumer(**GIVEN)


def test_the_command_line_says_so_in_one_line() -> None:
    said = run_outbox("consumers", "list", env={"OUTBOX_BOOTSTRAP_SERVERS": "127.0.0.1:1"})
    assert said.returncode == 2
    assert said.stderr.count("\n") == 1
    assert said.stderr.startswith("outbox: Kafka, as OUTBOX_BOOTSTRAP_SERVERS names it (127.0.0.1:1)")
