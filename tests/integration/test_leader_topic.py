"""The leader topic: what a harvester that has just joined the group hears."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, TopicPartition

from outbox_plugin import Settings
from outbox_plugin.adapters import kafka_reader, leader_topic_tail
from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.kafka_membership import KafkaMembership
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.core.last_leader import TAIL_HEARTBEATS
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat, Phase
from outbox_plugin.core.signing import Signer
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration


SECRET = b"s" * 32


@pytest.fixture(autouse=True)
def _kafka_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is."""
    monkeypatch.setattr(kafka_reader, "_LEADERS_SECONDS", 30.0)
    monkeypatch.setattr(leader_topic_tail, "_ASK_SECONDS", 30.0)


@contextmanager
def member(settings: Settings, instance: str, secret: bytes = SECRET) -> Iterator[KafkaMembership]:
    """A member of the leader group, which leaves it in the end."""
    membership = KafkaMembership(settings, KafkaNames.of(settings), 1, Signer(secret), instance)
    try:
        yield membership
    finally:
        membership.leave(timeout_seconds=1.0)


def heartbeat(instance: str, number: int, phase: Phase = "candidate") -> LeaderHeartbeat:
    since = "2026-01-01T00:00:00+00:00"
    return LeaderHeartbeat(0, phase, "", instance, "host", 1, since, "i", "p", published=number)


def create_topics(settings: Settings) -> None:
    with closing(KafkaAdmin.at_start(settings)) as admin:
        admin.ensure_topics(KafkaNames.of(settings), 1)


def first_heard(membership: KafkaMembership, instance: str) -> int:
    """Send numbered heartbeats until one is heard. Return its number."""
    heard: list[int] = []
    numbers = itertools.count()

    def sends_and_hears() -> bool:
        membership.send(heartbeat(instance, next(numbers)))
        heard.extend(each.published for each in membership.receive(0.1))
        return bool(heard)

    eventually(sends_and_hears, 30)
    return heard[0]


def first_sent(settings: Settings) -> int:
    """The number of the first heartbeat that is in the topic."""
    config = {"bootstrap.servers": settings.bootstrap_servers, "group.id": settings.group}
    with closing(Consumer(config)) as consumer:
        consumer.assign([TopicPartition(KafkaNames.of(settings).leader_topic, 0, 0)])
        message = consumer.poll(30 * PATIENCE)
        assert message is not None
        sent = LeaderHeartbeat.parse(message.value())
    assert sent is not None
    return sent.published


@pytest.mark.parametrize("instance", ["first", "second", "third"])
def test_a_new_member_hears_the_first_heartbeat_that_it_sends(settings: Settings, instance: str) -> None:
    """It takes over once it hears itself. A reader that began behind the heartbeat would have to wait for the next."""
    create_topics(settings)
    with member(settings, instance) as membership:
        eventually(lambda: membership.owned() == {0}, 30)
        heard = first_heard(membership, instance)
    assert heard == first_sent(settings)


def send(settings: Settings, instance: str, phases: Sequence[Phase], secret: bytes = SECRET) -> None:
    """Let a member send these heartbeats, and leave. A leader that has resigned leads again under another id."""
    with member(settings, instance, secret) as membership:
        for number, phase in enumerate(phases):
            leader_id = f"term {phases[:number].count('resigned')}"
            membership.send(replace(heartbeat(instance, 100 + number, phase), leader_id=leader_id))


@pytest.mark.parametrize(
    ("phases", "vacant"),
    [
        ([], {0}),
        (["candidate", "leader", "resigned"], {0}),
        (["leader", "resigned", "waiting"], {0}),
        (["leader", "resigned", "candidate", "leader"], set()),
        (["leader"], set()),
        (["leader", "resigned"] + TAIL_HEARTBEATS * ["waiting"], set()),
    ],
    ids=["nobody", "resigned", "waiting", "leader again", "leader", "long ago"],
)
def test_a_new_member_learns_whether_the_last_leader_has_resigned(
    settings: Settings, phases: Sequence[Phase], vacant: set[int]
) -> None:
    """What was sent before does not count as heard, and what somebody else has written counts for nothing."""
    create_topics(settings)
    send(settings, "earlier", phases)
    if phases:
        send(settings, "stranger", ["resigned"], secret=b"x" * 32)
    with member(settings, "late") as membership:
        assert first_heard(membership, "late") == 0
        assert membership.take_unsigned_heartbeat() is None
        assert membership.take_vacant() == vacant
        assert membership.take_vacant() == set()
