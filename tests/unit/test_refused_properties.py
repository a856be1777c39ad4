"""What a user sets that cannot be is said in one line, and where it would harm, it does not count."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from outbox_plugin import Settings
from outbox_plugin.adapters.kafka_clients import internal_client_config
from outbox_plugin.coordination.command import pause
from outbox_plugin.errors import InvalidSetting
from outbox_plugin.inbox import Inbox
from outbox_plugin.verification import topic_reader
from outbox_plugin.verification.topic_reader import verify_topic


def settings(**kafka: str) -> Settings:
    properties = {name.replace("_", "."): value for name, value in kafka.items()}
    return Settings(dsn="postgresql://nowhere", bootstrap_servers="127.0.0.1:1", kafka=properties)


def test_a_property_that_the_inboxs_consumer_refuses_is_said() -> None:
    nothing: Any = None
    inbox = Inbox(settings(max_poll_interval_ms="5000"), group="g", topics=["t"], handler=lambda *_: None)
    with pytest.raises(InvalidSetting, match=r"OUTBOX_KAFKA: .*max\.poll\.interval\.ms"):
        inbox._poll_loop(nothing)


def test_no_property_lets_a_verification_pass_over_records(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    class Stop(Exception):
        pass

    def consumer(config: dict[str, Any]) -> None:
        given.append(config)
        raise Stop

    monkeypatch.setattr(topic_reader, "Consumer", consumer)
    with pytest.raises(Stop):
        verify_topic(settings(auto_offset_reset="latest", enable_partition_eof="false"), "t")
    assert (given[0]["auto.offset.reset"], given[0]["enable.partition.eof"]) == ("earliest", True)


def test_tuning_for_events_and_inboxes_does_not_reach_clients_of_our_own() -> None:
    theirs = settings(
        linger_ms="5000",
        queue_buffering_max_ms="5000",
        delivery_timeout_ms="1",
        fetch_min_bytes="1000000",
        group_instance_id="one-of-all",
        ssl_ca_location="/ca.pem",
    )
    config = internal_client_config(
        theirs, linger_ms=0, message_timeout_ms=3_000, fetch_min_bytes=1, group_instance_id=None
    )
    named = {name: config.get(name) for name in ("linger.ms", "message.timeout.ms", "fetch.min.bytes")}
    assert named == {"linger.ms": 0, "message.timeout.ms": 3_000, "fetch.min.bytes": 1}
    assert config["ssl.ca.location"] == "/ca.pem"
    assert not config.keys() & {"queue.buffering.max.ms", "delivery.timeout.ms", "group.instance.id"}


@pytest.mark.parametrize("seconds", ["inf", "nan", "-inf", "0"])
def test_a_pause_ends(seconds: str) -> None:
    said = CliRunner().invoke(pause, ["g", f"--seconds={seconds}"], obj=None)
    assert said.exit_code == 2
    assert "Invalid value for '--seconds'" in said.output
