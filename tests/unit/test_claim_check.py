"""Large values go to an object store, and come back from it; what is wrong there is said."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from outbox_plugin.claim_check import ClaimCheck
from outbox_plugin.emit.encoding import MAX_RECORD_BYTES, Encoding, as_text
from outbox_plugin.emit.event import Event
from outbox_plugin.errors import ClaimUnavailable, InvalidEvent, UserError
from outbox_plugin.inbox.received import Received
from tests.row_records import value_and_headers

LARGE = "ä" * 600_000


class Scan(BaseModel):
    pages: list[str]


class Scanned(Event):
    topic: str = "scans"
    type: str = "Scanned"
    value: Scan


@pytest.fixture
def store() -> ClaimCheck:
    return ClaimCheck(f"memory://{uuid.uuid4()}")


def received(event: Event) -> Received:
    """The event, as an inbox gets it."""
    value, headers = value_and_headers(Encoding(as_text, None, MAX_RECORD_BYTES).row(event))
    return Received("scans", 0, 0, 0, b"k", value, headers, "id")


@pytest.mark.parametrize(
    ("event", "stored"),
    [
        (Event(topic="t", key="k", value=LARGE), LARGE.encode()),
        (Event(topic="t", key="k", value=b"\xff" * 2_000_000), b"\xff" * 2_000_000),
        (
            Event(topic="t", key="k", value={"a": LARGE}, headers=[("a", b"1"), ("a", None)]),
            f'{{"a":"{LARGE}"}}'.encode(),
        ),
        (Scanned(key="k", value=Scan(pages=[LARGE])), f'{{"pages":["{LARGE}"]}}'.encode()),
    ],
    ids=["text", "bytes", "JSON", "typed"],
)
def test_a_large_value_comes_back_from_the_store(event: Event, stored: bytes, store: ClaimCheck) -> None:
    checked = store.check_in(event)
    record = received(checked)
    assert json.loads(record.value or b"")["bytes"] == len(stored)
    assert store.value_of(record) == stored
    for field in ("topic", "key", "type", "idempotency_key", "occurred_at"):
        assert getattr(checked, field) == getattr(event, field)
    assert checked.header_items()[:-1] == event.header_items()


@pytest.mark.parametrize("value", [None, "small", b"\xff", {"a": 1}])
def test_a_small_value_stays_in_its_event(value: Any, store: ClaimCheck) -> None:
    event = Event(topic="t", key="k", value=value)
    assert store.check_in(event) is event
    record = received(event)
    assert store.value_of(record) == record.value


def test_the_limit_is_in_bytes() -> None:
    store = ClaimCheck(f"memory://{uuid.uuid4()}", above_bytes=4)
    stays, goes = (Event(topic="t", key="k", value=value) for value in ("ää", "ääa"))
    assert store.check_in(stays) is stays
    assert store.check_in(goes) is not goes


def test_a_serializer_makes_every_value() -> None:
    store = ClaimCheck(f"memory://{uuid.uuid4()}", serializer=lambda event: b"\xff" * event.value)
    for size in (10, 2_000_000):
        record = received(store.check_in(Event(topic="t", key="k", value=size)))
        assert store.value_of(record) == b"\xff" * size


def test_a_value_is_stored_once_under_its_digest(tmp_path: Path) -> None:
    store = ClaimCheck(f"file://{tmp_path}/a folder/values")
    claims = {str(store.check_in(Event(topic="t", key=key, value=LARGE)).value) for key in "abc"}
    assert len(claims) == 1
    [path] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert path.read_bytes() == LARGE.encode()


@pytest.mark.parametrize("headers", [{"a": "1"}, [("a", "1")]])
def test_an_event_that_is_checked_in_twice_is_stored_once(headers: Any) -> None:
    """Though its claim is larger than what stays in an event."""
    store = ClaimCheck(f"memory://{uuid.uuid4()}", above_bytes=10)
    event = store.check_in(Event(topic="t", key="k", value=LARGE, headers=headers))
    assert store.check_in(event) == event
    assert store.value_of(received(event)) == LARGE.encode()


def test_a_writer_that_fails_leaves_the_value_that_was_stored(tmp_path: Path) -> None:
    """It writes the same value again, and its disk is full: a file may have 1,000 bytes."""
    store = ClaimCheck(f"file://{tmp_path}", above_bytes=10)
    event = store.check_in(Event(topic="t", key="k", value=LARGE))
    again = (
        "import resource, signal; from outbox_plugin import Event; from outbox_plugin.claim_check import ClaimCheck\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"ClaimCheck('file://{tmp_path}', above_bytes=10).check_in(Event(topic='t', key='k', value='ä' * 600_000))"
    )
    done = subprocess.run([sys.executable, "-c", again], capture_output=True, text=True, timeout=60, check=False)
    assert "ClaimUnavailable: the value" in done.stderr
    assert "File too large" in done.stderr
    assert store.value_of(received(event)) == LARGE.encode()
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_a_store_that_is_not_there_is_not_taken_for_a_value_that_was_deleted(
    store: ClaimCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(store._store, "makedirs", missing)
    with pytest.raises(ClaimUnavailable, match="could not be stored: The specified bucket does not exist"):
        store.check_in(Event(topic="t", key="k", value=LARGE))


def test_a_value_that_is_gone_or_another_one_is_not_returned(tmp_path: Path) -> None:
    store = ClaimCheck(f"file://{tmp_path}")
    record = received(store.check_in(Event(topic="t", key="k", value=LARGE)))
    [path] = [path for path in tmp_path.rglob("*") if path.is_file()]
    path.write_text(LARGE[:-1])
    with pytest.raises(ClaimUnavailable, match="another value"):
        store.value_of(record)
    path.unlink()
    with pytest.raises(ClaimUnavailable, match="was it deleted before it was read"):
        store.value_of(record)


def test_a_store_that_fails_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "values").write_text("a file where a folder should be")
    store = ClaimCheck(f"file://{tmp_path}/values")
    with pytest.raises(ClaimUnavailable, match=r"the value [0-9a-f]{64} could not be stored: .*"):
        store.check_in(Event(topic="t", key="k", value=LARGE))


@pytest.mark.parametrize(
    "claim", [b"", b"sha256:../../etc/passwd", b"sha256:" + b"G" * 64, b"file:///etc/passwd", None]
)
def test_a_claim_names_nothing_outside_of_the_store(claim: bytes | None, store: ClaimCheck) -> None:
    with pytest.raises(
        ValueError, match=r"the header claim-check begins with .*; expected sha256: and 64 hexadecimal digits"
    ):
        store.value_of(Received("t", 0, 0, 0, None, b"v", (("claim-check", claim),), "id"))


@pytest.mark.parametrize("url", ["nowhere://bucket", "s3://bucket/folder"])
def test_a_store_of_an_unknown_kind_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(UserError, match=r"the object store of the claim check: .*(nowhere|s3fs)"):
        ClaimCheck(url)


def test_a_value_that_is_no_text_is_refused(store: ClaimCheck) -> None:
    with pytest.raises(InvalidEvent, match="event value: not valid text"):
        store.check_in(Event(topic="t", key="k", value="\ud800" * 1_000_000))
