"""A signature proves one record in one place; a heartbeat is heard once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outbox_plugin.core.copied_heartbeats import COPY_OFFSETS, REMEMBERED_INSTANCES, CopyFilter
from outbox_plugin.core.heartbeat_codec import HeartbeatCodec, LeaderRecord
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat, is_goharvests
from outbox_plugin.core.signing import HEADER, Headers, Signer, Slot

SIGNER = Signer(b"ours" * 8)
SLOT = Slot("heartbeat", "outbox-leader", 0)
BEAT = LeaderHeartbeat(0, "leader", "term", "host-1", "host", 1, "2026-01-01T00:00:00+00:00", "incarnation", "place", 3)

slots = st.builds(
    Slot, st.sampled_from(["heartbeat", "progress"]), st.sampled_from(["a", "a-b", "b"]), st.integers(0, 1023)
)
signed = st.tuples(slots, st.binary(max_size=8), st.binary(max_size=64))


@given(signed)
def test_what_is_signed_verifies(record: tuple[Slot, bytes, bytes]) -> None:
    assert SIGNER.verifies(*record, SIGNER.sign(*record))
    assert not Signer(bytes(32)).verifies(*record, SIGNER.sign(*record))


@given(signed, signed)
def test_no_signature_serves_for_another_record(
    one: tuple[Slot, bytes, bytes], other: tuple[Slot, bytes, bytes]
) -> None:
    assume(one != other)
    assert not SIGNER.verifies(*other, SIGNER.sign(*one))


@given(signed, st.integers(0, 7))
def test_no_byte_may_move_from_the_key_to_the_value(record: tuple[Slot, bytes, bytes], count: int) -> None:
    slot, key, value = record
    assume(0 < count <= len(value))
    assert not SIGNER.verifies(slot, key + value[:count], value[count:], SIGNER.sign(slot, key, value))


SIGNATURE = SIGNER.sign(SLOT, b"0", b"value")[0][1]
assert isinstance(SIGNATURE, bytes)


@pytest.mark.parametrize(
    "headers",
    [
        None,
        [],
        [(HEADER, None)],
        [(HEADER, b"")],
        [(HEADER, SIGNATURE[:-1])],
        [(HEADER, SIGNATURE + b"\0")],
        [(HEADER, SIGNATURE), (HEADER, SIGNATURE)],
        [(HEADER, b"x" * 32), (HEADER, SIGNATURE)],
        [(HEADER, "text")],
        [(HEADER.upper(), SIGNATURE)],
        [(HEADER, b"x" * 1_000_000)],
    ],
)
def test_a_signature_that_is_missing_cut_or_doubled_is_none(headers: Headers | None) -> None:
    assert SIGNER.verifies(SLOT, b"0", b"value", [("other", b"x"), (HEADER, SIGNATURE)])
    assert not SIGNER.verifies(SLOT, b"0", b"value", headers)


@given(st.binary(), st.binary(), st.lists(st.tuples(st.just(HEADER) | st.text(), st.none() | st.text() | st.binary())))
def test_nobody_guesses_a_signature(key: bytes, value: bytes, headers: Headers) -> None:
    assert not SIGNER.verifies(SLOT, key, value, headers)


def test_a_tombstone_is_nobodys() -> None:
    assert not SIGNER.verifies(SLOT, b"0", None, SIGNER.sign(SLOT, b"0", b""))
    assert not SIGNER.verifies(SLOT, None, b"", SIGNER.sign(SLOT, b"", b""))


def test_a_secret_is_not_printed_and_not_short() -> None:
    assert "ours" not in repr(SIGNER)
    with pytest.raises(ValueError, match="32 bytes"):
        Signer(b"")


def heard(codec: HeartbeatCodec, record: LeaderRecord) -> LeaderHeartbeat | None:
    heartbeat = codec.decode(record)
    return heartbeat if codec.is_new(record, heartbeat) else None


def test_a_heartbeat_is_heard_once_and_in_its_partition() -> None:
    sender, listener = HeartbeatCodec("t", SIGNER, "host-1"), HeartbeatCodec("t", SIGNER, "other")
    first, second = sender.encode(BEAT), sender.encode(BEAT)
    assert heard(listener, LeaderRecord(1, 0, *first)) is None
    assert heard(listener, LeaderRecord(0, 0, *first)) == replace(BEAT, beat=1)
    assert heard(listener, LeaderRecord(0, 1, *first)) is None
    assert heard(listener, LeaderRecord(0, 2, *second)) == replace(BEAT, beat=2)
    assert heard(listener, LeaderRecord(0, 3, *first)) is None
    assert heard(HeartbeatCodec("another topic", SIGNER), LeaderRecord(0, 0, *first)) is None
    assert heard(HeartbeatCodec("t", Signer(bytes(32))), LeaderRecord(0, 0, *first)) is None


def test_a_heartbeat_says_what_its_sender_has_heard() -> None:
    sender, listener = HeartbeatCodec("t", SIGNER, "host-1"), HeartbeatCodec("t", SIGNER)
    heard(sender, LeaderRecord(0, 41, None, b"anything", None))
    found = listener.decode(LeaderRecord(0, 42, *sender.encode(BEAT)))
    assert found is not None
    assert found.after == 41


def test_a_dead_leader_seems_alive_for_so_many_copies_at_most() -> None:
    """To one who did not listen when it lived."""
    listener = CopyFilter("another")
    dead = [replace(BEAT, beat=beat, after=beat - 2) for beat in range(1, 10_001)]  # It was alone.
    last = len(dead)
    new = [each for number, each in enumerate(dead) if listener.is_new(each, last + number)]
    assert new == []
    latest_first = dead[-COPY_OFFSETS:]
    new = [each for number, each in enumerate(latest_first) if listener.is_new(each, last + number)]
    assert len(new) <= COPY_OFFSETS


def test_own_heartbeats_are_heard_however_late() -> None:
    own, other = CopyFilter("host-1"), CopyFilter("another")
    late = replace(BEAT, beat=1, after=0)
    assert own.is_new(late, 10 * COPY_OFFSETS)
    assert not own.is_new(late, 10 * COPY_OFFSETS + 1)
    assert not other.is_new(late, 10 * COPY_OFFSETS)


def test_memory_is_bounded_and_keeps_who_was_heard_last() -> None:
    listener = CopyFilter()
    steady = replace(BEAT, after=10)
    for number in range(1, 2 * REMEMBERED_INSTANCES):
        assert listener.is_new(replace(BEAT, instance=f"host-{number}", beat=1, after=10), 11)
        assert listener.is_new(replace(steady, instance="steady", beat=number), 11)
    assert not listener.is_new(replace(steady, instance="steady", beat=1), 11)
    assert len(listener._last_beats) <= REMEMBERED_INSTANCES


@pytest.mark.parametrize(
    ("body", "is_one"), [(b"1700000000000000000%name", True), (BEAT.encode(), False), (b"", False), (None, False)]
)
def test_goharvests_heartbeats_are_told(body: bytes | None, is_one: bool) -> None:
    assert is_goharvests(body) == is_one
