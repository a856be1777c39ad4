"""The five messages on the wire, as Marshal writes them; what is malformed names its field."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    MalformedMessage,
    Message,
    ReleaseGroup,
    ReleasingPartition,
    coordination_partition,
    decode,
    encode,
)

WIRE = {
    b"Heartbeat/1/1700000000/run-7/worker-1/billing/orders/3/42": Heartbeat(
        1, 1_700_000_000, "run-7", "worker-1", "billing", "orders", 3, 42
    ),
    b"ClaimingPartition/1/1700000000/run-7/worker-1/billing/orders/3": ClaimingPartition(
        1, 1_700_000_000, "run-7", "worker-1", "billing", "orders", 3
    ),
    b"ReleasingPartition/1/1700000000/run-7/worker-1/billing/orders/3/42": ReleasingPartition(
        1, 1_700_000_000, "run-7", "worker-1", "billing", "orders", 3, 42
    ),
    b"ClaimingMessages/1/1700000000/run-7/worker-1/billing/orders/3/42": ClaimingMessages(
        1, 1_700_000_000, "run-7", "worker-1", "billing", "orders", 3, 42
    ),
    b"ReleaseGroup/1/1700000000/run-7/operator/billing//0/1700000600": ReleaseGroup(
        1, 1_700_000_000, "run-7", "operator", "billing", "", 0, 1_700_000_600
    ),
    b"ReleaseGroup/1/1700000000/run-7/operator/billing//0": ReleaseGroup(
        1, 1_700_000_000, "run-7", "operator", "billing", "", 0
    ),
}

FIELDS = [
    "type",
    "version",
    "timestamp",
    "instance_id",
    "client_id",
    "group_id",
    "topic",
    "partition",
    "offset",
    "expires",
]

words = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), min_size=1)
numbers = st.integers(0, 2**63 - 1)
common = (st.integers(0, 9), numbers, words, words, words, words, numbers)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Heartbeat, *common, numbers),
    st.builds(ClaimingPartition, *common),
    st.builds(ReleasingPartition, *common, numbers),
    st.builds(ClaimingMessages, *common, numbers),
    st.builds(ReleaseGroup, *common[:5], st.just(""), st.just(0), numbers | st.none()),
)


@pytest.mark.parametrize(("body", "message"), WIRE.items())
def test_the_wire_form_is_marshals(body: bytes, message: Message) -> None:
    assert encode(message) == body
    assert decode(body) == message


@given(messages)
def test_what_is_encoded_is_decoded(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary() | st.text().map(str.encode) | st.lists(st.sampled_from(["Heartbeat", "", "1", "x"])).map("/".join))
def test_whatever_stands_on_the_topic_is_a_message_or_malformed(body: bytes | str) -> None:
    message, field = None, ""
    try:
        message = decode(body.encode() if isinstance(body, str) else body)
    except MalformedMessage as malformed:
        field = malformed.field
    assert field in FIELDS if message is None else decode(encode(message)) == message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (None, "type"),
        (b"", "type"),
        (b"Banana/1/2/i/c/g/t/3", "type"),
        (b"heartbeat/1/2/i/c/g/t/3/4", "type"),
        (b"Heartbeat", "version"),
        (b"Heartbeat/one/2/i/c/g/t/3/4", "version"),
        (b"Heartbeat/-1/2/i/c/g/t/3/4", "version"),
        (b"Heartbeat/1/2.5/i/c/g/t/3/4", "timestamp"),
        (b"Heartbeat/1/99999999999999999999/i/c/g/t/3/4", "timestamp"),
        (b"Heartbeat/1/2//c/g/t/3/4", "instance_id"),
        (b"Heartbeat/1/2/i//g/t/3/4", "client_id"),
        (b"Heartbeat/1/2/i/c//t/3/4", "group_id"),
        (b"Heartbeat/1/2/i/c/\xff/t/3/4", "group_id"),
        (b"Heartbeat/1/2/i/c/g//3/4", "topic"),
        (b"Heartbeat/1/2/i/c/g/t", "partition"),
        (b"Heartbeat/1/2/i/c/g/t/x/4", "partition"),
        ("Heartbeat/1/2/i/c/g/t/٣/4".encode(), "partition"),
        (b"Heartbeat/1/2/i/c/g/t/3", "offset"),
        (b"Heartbeat/1/2/i/c/g/t/3/ 4", "offset"),
        (b"Heartbeat/1/2/i/c/g/t/3/4/5", "offset"),
        (b"ClaimingPartition/1/2/i/c/g/t/3/4", "offset"),
        (b"ReleaseGroup/1/2/i/c/g//0/soon", "expires"),
    ],
)
def test_a_malformed_message_names_its_field(body: bytes | None, field: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        decode(body)
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (ClaimingPartition(1, 2, "i", "a/b", "g", "t", 0), "client_id"),
        (ClaimingPartition(1, 2, "i", "", "g", "t", 0), "client_id"),
        (ClaimingPartition(1, 2, "i", "c", "g", "t", -1), "partition"),
        (Heartbeat(1, 2, "i", "c", "g", "t", 0, 2**63), "offset"),
        (ClaimingPartition(1, 2, "i", "\ud800", "g", "t", 0), "message"),
    ],
)
def test_what_the_wire_cannot_carry_is_not_encoded(message: Message, field: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        encode(message)
    assert caught.value.field == field


def test_messages_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        decode(b"ClaimingPartition/1/2/i/c/g/t/3").timestamp = 3  # type: ignore[misc]


@pytest.mark.parametrize(("topic", "partitions", "partition"), [("", 8, 4), ("orders", 8, 2), ("orders", 97, 62)])
def test_where_a_topic_is_talked_about(topic: str, partitions: int, partition: int) -> None:
    """By hand: MD5 of "orders" begins with 12c500ed0b787910, which is 0x1079780bed00c512 in little-endian."""
    assert coordination_partition(topic, partitions) == partition
