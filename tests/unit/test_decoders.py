"""Whatever bytes arrive: what reads them gives a value within its bounds, or the error that it documents."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outbox_plugin.coordination.command import _until
from outbox_plugin.coordination.messages import MalformedMessage, decode, encode
from outbox_plugin.coordination.partition_owners import Pause, World
from outbox_plugin.core.event_identity import IDENTITY_BYTES, event_identity
from outbox_plugin.core.id_ranges import LARGEST_ID, SMALLEST_ID, IdRanges
from outbox_plugin.core.leader_heartbeat import LARGEST_LAYOUT, LARGEST_SHARD, TROUBLE_CHARACTERS, LeaderHeartbeat
from outbox_plugin.core.progress import LATEST_TIME, MalformedProgress, OutboxIdentity, ProgressRecord, Publication
from outbox_plugin.dagster.cursor import Cursor, Use
from outbox_plugin.inbox.received import Received
from outbox_plugin.status.reader import Status
from outbox_plugin.verification.verifier import Verifier

HEARTBEAT = LeaderHeartbeat(
    0, "leader", "term", "host-1", "host", 1, "2026-01-01T00:00:00+00:00", "incarnation", "place", 3
)
PROGRESS = ProgressRecord(
    OutboxIdentity("incarnation", "place"), "term", 2, (Publication(IdRanges(((1, 3), (7, 8))), 900, 5_000, 4_000),)
)
CURSOR = Cursor(1.5, {"0": "a"}, 2, 3.0, {"t": 4}, ("t",), 5, 6.0, 7)
MESSAGE = b"LeaderHeartbeat/1/1700000000/run-7/worker-1/billing/orders/3/42"

DEEP = b"[" * 20_000
NUMBERS = st.sampled_from([0, -1, 1.5, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, 10**400, math.nan, math.inf, -math.inf])
scalars = (
    st.none() | st.booleans() | st.integers() | NUMBERS | st.text() | st.sampled_from(["\ud800", "\0", "x" * 20_000])
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=5
)


def mutated(whole: bytes) -> st.SearchStrategy[bytes]:
    """`whole` with some bytes cut out, and others put there."""
    place = st.integers(0, len(whole))
    return st.builds(
        lambda start, end, put: whole[: min(start, end)] + put + whole[max(start, end) :],
        place,
        place,
        st.binary(max_size=8) | st.sampled_from([DEEP, b"1" * 5_000, b"NaN", b"-1", b'"\\ud800"', b"null", b"\xff"]),
    )


def altered(whole: dict[str, Any], inner: dict[str, Any] | None = None) -> st.SearchStrategy[bytes]:
    """JSON of `whole` with one of its fields, or one of `inner`'s in its only publication, of another kind."""

    def changed(field: str, value: Any) -> bytes:
        if inner is not None and field in inner:
            return json.dumps({**whole, "publications": [{**inner, field: value}]}).encode()
        return json.dumps({**whole, field: value}).encode()

    return st.builds(changed, st.sampled_from([*whole, *(inner or {})]), anything)


def from_bytes(valid: bytes, structured: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.binary() | mutated(valid) | structured | anything.map(lambda value: json.dumps(value).encode())


doubled = b'{"shard": 1, ' + HEARTBEAT.encode()[1:]


@given(from_bytes(HEARTBEAT.encode(), altered(asdict(HEARTBEAT))))
@example(DEEP)
@example(doubled)
def test_a_heartbeat_is_within_its_bounds_or_none(body: bytes) -> None:
    heartbeat = LeaderHeartbeat.parse(body)
    if heartbeat is None:
        return
    assert 0 <= heartbeat.shard <= LARGEST_SHARD
    assert 0 <= heartbeat.layout <= LARGEST_LAYOUT
    assert heartbeat.records_per_second < math.inf
    text = f"{heartbeat.instance}{heartbeat.host}{heartbeat.since}{heartbeat.leader_id}{heartbeat.trouble}"
    assert len(text.encode()) < 100_000
    assert LeaderHeartbeat.parse(heartbeat.encode()) == heartbeat


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shard", -1),
        ("shard", "0"),
        ("shard", [0]),
        ("shard", True),
        ("layout", 2**62),
        ("layout", None),
        ("phase", "king"),
        ("leader_id", 7),
        ("records_per_second", math.nan),
        ("host", "\ud800"),
        ("instance", "x" * 100_000),
    ],
)
def test_what_is_no_heartbeat_is_none(field: str, value: object) -> None:
    assert LeaderHeartbeat.parse(HEARTBEAT.encode()) == HEARTBEAT
    assert LeaderHeartbeat.parse(json.dumps({**asdict(HEARTBEAT), field: value}).encode()) is None


@given(st.text(st.characters()) | st.just("\udcff" * TROUBLE_CHARACTERS * 2))
def test_a_leader_hears_itself_whatever_troubles_it(trouble: str) -> None:
    heard = LeaderHeartbeat.parse(replace(HEARTBEAT, trouble=trouble).encode())
    assert heard is not None
    assert heard.trouble is not None


def progress_fields() -> tuple[dict[str, Any], dict[str, Any]]:
    fields = json.loads(PROGRESS.encode())
    return fields, fields["publications"][0]


@given(from_bytes(PROGRESS.encode(), altered(*progress_fields())))
@example(DEEP)
@example(b'{"version":1,"publications":' + DEEP)
def test_a_progress_record_is_within_its_bounds_or_malformed(body: bytes) -> None:
    try:
        record = ProgressRecord.parse(body)
    except MalformedProgress:
        return
    assert isinstance(record.leader_id, str)
    assert record.records >= 0
    assert record.identity.place.encode()
    for each in record.publications:
        assert 0 <= each.horizon <= LARGEST_ID
        assert all(abs(time) <= LATEST_TIME for time in (each.created_until, each.created_from) if time is not None)
        assert all(SMALLEST_ID <= first < after <= LARGEST_ID for first, after in each.ids.ranges)
    assert ProgressRecord.parse(record.encode()) == record


def test_a_progress_record_survives() -> None:
    assert ProgressRecord.parse(PROGRESS.encode()) == PROGRESS


@given(st.text() | mutated(b"{[1,3),[7,8)}").map(lambda text: text.decode(errors="replace")))
@example("{[1,٣)}")
@example("{[3,1)}")
@example("{[1,3),[2,4)}")
@example("{[1,99999999999999999999)}")
def test_ids_are_what_postgres_would_write_or_refused(text: str) -> None:
    try:
        ids = IdRanges.parse(text)
    except ValueError:
        return
    assert ids.text() == text


@given(
    (mutated(CURSOR.encode().encode()) | altered(asdict(CURSOR)) | st.just(DEEP)).map(lambda b: b.decode("latin-1"))
    | st.text(st.characters())
)
def test_a_cursor_serves_the_next_tick_or_is_empty(text: str) -> None:
    cursor = Cursor.parse(text).after(Status(0, None, (), ()), 10.0, troubled=True)
    cursor, _ = cursor.moved({"t": 5, "u": 6}, 20.0)
    cursor, _ = cursor.used(Use(5, 1.0, 2), 30.0)
    assert Cursor.parse(cursor.encode()) == cursor


@given(st.binary() | mutated(MESSAGE) | st.lists(anything, max_size=10).map(lambda parts: "/".join(map(str, parts))))
def test_a_coordination_message_is_of_its_form_or_malformed(body: bytes | str) -> None:
    try:
        message = decode(body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass"))
    except MalformedMessage:
        return
    assert decode(encode(message)) == message
    world = World(1.0)
    for now in (0.0, float(message.timestamp)):
        world.apply(message, now)
        assert list(world.rows(now)) == list(world.rows(now))


@given(st.integers(0, 2**63 - 1))
@example(10**12)
def test_whenever_a_pause_ends_it_can_be_told(until: int) -> None:
    assert _until(Pause(until, "operator")).startswith("until ")


def received(**fields: Any) -> Received:
    return Received(**{"topic": "t", "partition": 0, "offset": 1, "timestamp": 0, "key": None, "value": None,
                       "headers": (), "idempotency_key": "i", **fields})  # fmt: skip


header_values = st.none() | st.binary() | st.sampled_from([b"\xff", b"\0", b"x" * 5_000, b"9999-12-31T23:59:59-23:59"])


@given(
    st.lists(st.tuples(st.sampled_from(["event-type", "occurred-at", "é"]), header_values)),
    st.integers(-(2**63), 2**63 - 1),
    st.binary() | st.just(DEEP),
)
def test_a_received_record_can_be_asked_whatever_it_holds(
    headers: list[tuple[str, bytes | None]], timestamp: int, value: bytes
) -> None:
    record = received(headers=tuple(headers), timestamp=timestamp, value=value)
    assert isinstance(record.type, str)
    assert isinstance(record.occurred_at, datetime)
    assert record.occurred_at.tzinfo is not None
    try:
        record.json()
    except ValueError:
        return


@given(header_values, header_values)
@example(b"\xff", b"\xfe")
@example(b"\0", b"\0\0")
@example(b"x" * 5_000, b"x" * 5_001)
def test_two_events_that_name_themselves_differently_are_two(one: bytes | None, other: bytes | None) -> None:
    """Or the second one would be taken for handled, and be lost."""
    names = [
        event_identity((("idempotency-key", name),), f"t/0/{offset}").key for offset, name in enumerate((one, other))
    ]
    assert (names[0] == names[1]) == (one == other and bool(one))
    for name in names:
        assert 0 < len(name.encode()) <= IDENTITY_BYTES
        assert "\0" not in name


@given(
    st.lists(
        st.tuples(st.sampled_from(["outbox-sequence", "outbox-job", "idempotency-key", "other"]), header_values),
        max_size=6,
    ),
    st.binary(),
)
@example([("outbox-sequence", b"first")], b"k")
@example([("outbox-sequence", b"1" * 5_000)], b"k")
def test_a_record_is_judged_whatever_its_headers_hold(headers: list[tuple[str, bytes | None]], key: bytes) -> None:
    verifier = Verifier()
    verifier.judge("t/0 offset 0", key, headers)
    assert verifier.verdict.records == 1
    assert str(verifier.verdict).encode()
