"""Large values go to an object store, and come back from it; what is wrong there is said."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import traceback
import uuid
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from outbox_plugin.claim_check import ClaimCheck
from outbox_plugin.emit.cloud_events import CloudEventsMode
from outbox_plugin.emit.event import Event
from outbox_plugin.emit.row_encoder import MAX_RECORD_BYTES, RowEncoder, Serializer, as_bytes, as_text
from outbox_plugin.errors import ClaimUnavailable, InvalidEvent, UserError
from outbox_plugin.inbox.received import Received
from outbox_plugin.threads.calls_with_deadline import MAX_OVERDUE_CALLS
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
    value, headers = value_and_headers(RowEncoder(as_text, None, MAX_RECORD_BYTES).row(event))
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


JSON = {"a": [1.5, None, "ü" * 10]}


@pytest.mark.parametrize("serializer", [as_text, as_bytes])
@pytest.mark.parametrize("mode", ["binary", "structured"])
@pytest.mark.parametrize(
    ("value", "content_type", "data"),
    [
        (JSON, "", JSON),
        ("a text of some length", "text/plain", "a text of some length"),
        (b"\xff" * 30, "application/pdf", b"\xff" * 30),
        (None, "", None),
    ],
)
@pytest.mark.parametrize("above_bytes", [10, 1_000])
def test_a_cloud_event_is_read_in_one_way_wherever_its_data_is(
    value: Any, content_type: str, data: Any, above_bytes: int, mode: CloudEventsMode, serializer: Serializer
) -> None:
    store = ClaimCheck(f"memory://{uuid.uuid4()}", above_bytes=above_bytes)
    event = Event(topic="t", key="k", type="Scanned", value=value, content_type=content_type)
    row = RowEncoder(serializer, "/scans", MAX_RECORD_BYTES, mode).row(store.check_in(event))
    record = Received("scans", 0, 0, 0, b"k", *value_and_headers(row), "id")
    read = replace(record, value=store.value_of(record)).cloud_event()
    assert read.get_data() == data
    assert (read.get_id(), read.get_type()) == (str(event.idempotency_key), "Scanned")
    assert (read.get_time(), read.get_datacontenttype()) == (event.occurred_at, content_type or "application/json")
    attributes = record.cloud_event()  # They can be read without fetching the data.
    assert (attributes.get_id(), attributes.get_type()) == (read.get_id(), "Scanned")


@given(
    st.binary(max_size=40) | st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20),
    st.integers(0, 20),
    st.sampled_from([as_text, as_bytes]),
    st.lists(st.tuples(st.sampled_from("aA"), st.none() | st.binary(max_size=4)), max_size=3),
)
def test_any_value_comes_back_byte_for_byte(value: Any, above_bytes: int, serializer: Serializer, headers: Any) -> None:
    store = ClaimCheck("memory://any", above_bytes=above_bytes, serializer=serializer)
    event = store.check_in(Event(topic="t", key="k", value=value, headers=headers))
    record = Received(
        "t", 0, 0, 0, b"k", *value_and_headers(RowEncoder(serializer, None, 1_000, "binary").row(event)), ""
    )
    body = value.encode() if isinstance(value, str) else value
    assert store.value_of(record) == body
    assert ("claim-check" in dict(record.headers)) == (len(body) > above_bytes)
    assert [header for header in record.headers if header[0] in "aA"] == headers


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


def test_a_file_outlives_a_power_cut_as_its_event_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file is durable once its folder is, and a new folder once the one above is."""
    synced: list[str] = []
    sync = os.fsync

    def fsync(file: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{file}").readlink()))
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    event = ClaimCheck(f"file://{tmp_path}/values").check_in(Event(topic="t", key="k", value=LARGE))
    start = str(dict(event.header_items())["claim-check"]).removeprefix("sha256:")[:2]
    folders = [f"{tmp_path}/values/{start}", f"{tmp_path}/values", str(tmp_path)]
    assert synced[1:] == folders


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


@pytest.mark.parametrize(
    "url", ["", "folder", "s3:/bucket", "s3://", "file://", "file://tmp/values", "/values", 7, None]
)
def test_what_is_no_url_of_a_store_is_refused_rather_than_taken_for_a_folder_here(url: Any) -> None:
    """Fsspec takes a text without :// for a folder in the working directory, where no consumer would look."""
    with pytest.raises(UserError, match=r"expected a URL with a folder, such as s3://bucket/folder or file:///folder"):
        ClaimCheck(url)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"above_bytes": "9"}, "above_bytes: expected a number of bytes, 0 or more .given: '9'"),
        ({"above_bytes": -1}, "above_bytes: expected a number of bytes, 0 or more .given: -1"),
        ({"timeout_seconds": 0}, "timeout_seconds: expected a number of seconds above 0 .given: 0"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds: expected a number of seconds above 0 .given: nan"),
        ({"storage_options": "secret"}, "storage_options: expected a dict .given: one of type str"),
    ],
)
def test_a_wrong_argument_is_named(wrong: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        ClaimCheck("memory://values", **wrong)


@pytest.mark.parametrize("headers", [{"claim-check": "mine"}, [("claim-check", None)], [("claim-check", b"\xff")]])
def test_a_header_of_the_callers_that_is_no_claim_is_refused(headers: Any, store: ClaimCheck) -> None:
    """Consumers could not read the value, large or small."""
    for value in ("small", LARGE):
        with pytest.raises(
            InvalidEvent, match=r"event headers.claim-check: the claim check begins with .*; expected sha"
        ):
            store.check_in(Event(topic="t", key="k", value=value, headers=headers))


@pytest.mark.parametrize("cache", ["filecache", "simplecache", "blockcache"])
def test_a_store_behind_a_cache_gets_the_value(cache: str, store: ClaimCheck) -> None:
    """And not a file here of the same name: one of them is called filecache."""
    cached = ClaimCheck(f"{cache}::memory:/{store._folder}")
    event = cached.check_in(Event(topic="t", key="k", value=LARGE))
    assert store.value_of(received(event)) == LARGE.encode()


class Bucket(MemoryFileSystem):  # type: ignore[misc]
    """A store as S3 is: asked for a folder, it makes the bucket; and its clients do not survive a fork."""

    protocol = ("s3", "s3a")
    buckets: ClassVar[set[str]] = set()
    failure: ClassVar[Exception | None] = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.process = os.getpid()
        if self.failure and options.get("at_once"):
            raise self.failure

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("s3://", "memory://")))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.buckets.add(path.split("/")[1])

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        if self.failure:
            raise self.failure
        if self.process != os.getpid():
            raise RuntimeError("This class is not fork-safe")
        if path.split("/")[1] not in self.buckets:
            raise FileNotFoundError("The specified bucket does not exist")
        super().pipe_file(path, value)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> type[Bucket]:
    monkeypatch.setitem(import_module("fsspec.registry")._registry, "s3", Bucket)
    monkeypatch.setattr(Bucket, "buckets", {"shop"})
    return Bucket


def test_a_bucket_that_is_not_there_is_not_made(bucket: type[Bucket]) -> None:
    """Its name may have a typing error, and who may write objects may seldom make a bucket, or ask for one."""
    large = Event(topic="t", key="k", value=LARGE)
    store = ClaimCheck("s3://shop/values")
    assert store.value_of(received(store.check_in(large))) == LARGE.encode()
    with pytest.raises(ClaimUnavailable, match="could not be stored: The specified bucket does not exist"):
        ClaimCheck("s3://shpo/values").check_in(large)
    assert bucket.buckets == {"shop"}


def test_a_store_works_in_a_forked_process(bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
    store = ClaimCheck("s3://shop/values")
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    assert store.check_in(Event(topic="t", key="k", value=LARGE)).value != LARGE


@pytest.mark.parametrize(
    ("url", "options", "said", "shown"),
    [
        ("s3://shop:pw%2F1@bucket/f", {}, "Invalid bucket name 'shop:pw/1@bucket'", "Invalid bucket name '***@bucket'"),
        ("s3://shop/f", {"secret": "pw1"}, "signed with pw1", "signed with ***"),
        ("s3://shop/f", {"client_kwargs": {"password": "pw1"}}, "530 PASS pw1", "530 PASS ***"),
        ("s3://shop/f", {}, "no route to http://u:pw1@proxy:3128/x", "no route to http://***@proxy:3128/x"),
        ("s3://shop/f", {}, "403, url='https://a/b?v=1&sig=pw1&e=2'", "403, url='https://a/b?v=1&sig=***&e=2'"),
        ("s3://shop/f", {}, "GET /b?X-Amz-Security-Token=pw1 failed", "GET /b?X-Amz-Security-Token=*** failed"),
        ("s3://shop/f", {"endpoint_url": "http://minio"}, "cannot reach http://minio", "cannot reach http://minio"),
    ],
)
def test_no_error_shows_the_credentials_of_a_store(
    url: str, options: Any, said: str, shown: str, bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ClaimCheck(url, storage_options=options)
    monkeypatch.setattr(bucket, "failure", LookupError(said))
    with pytest.raises(ClaimUnavailable) as caught:
        store.check_in(Event(topic="t", key="k", value=LARGE))
    assert str(caught.value).endswith(f"could not be stored: {shown}")
    assert "pw" not in "".join(traceback.format_exception(caught.value))
    monkeypatch.setattr(bucket, "failure", RuntimeError(said))
    with pytest.raises(UserError) as refused:  # As FTP does, whose errors are none of the system's.
        ClaimCheck(url, storage_options={**options, "at_once": True})
    assert str(refused.value) == f"the object store of the claim check: {shown}"


def test_a_store_that_does_not_answer_holds_nobody_up(bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
    """The S3 client waits for ever for the word to go on, although it has a time-out for reading."""
    answer = threading.Event()
    put = bucket.pipe_file

    def slow_put(self: Bucket, path: str, value: bytes, **options: Any) -> None:
        answer.wait()
        put(self, path, value, **options)

    monkeypatch.setattr(bucket, "pipe_file", slow_put)
    store = ClaimCheck("s3://shop/values", timeout_seconds=0.02)
    large = Event(topic="t", key="k", value=LARGE)
    try:
        for _ in range(MAX_OVERDUE_CALLS):
            with pytest.raises(ClaimUnavailable, match=r"not be stored: the store did not answer within 0\.02 seconds"):
                store.check_in(large)
        with pytest.raises(ClaimUnavailable, match="has not answered 8 earlier calls, which still wait"):
            store.check_in(large)
    finally:
        answer.set()
    for thread in store._calls._overdue:
        thread.join()
    store._timeout_seconds = 60.0
    assert store.value_of(received(store.check_in(large))) == LARGE.encode()


def test_a_store_can_be_sent_to_another_process(store: ClaimCheck) -> None:
    record = received(store.check_in(Event(topic="t", key="k", value=LARGE)))
    assert pickle.loads(pickle.dumps(store)).value_of(record) == LARGE.encode()


def test_no_refused_url_shows_its_credentials() -> None:
    with pytest.raises(UserError, match="given: 'file://\\*\\*\\*@host'"):
        ClaimCheck("file://shop:pw1@host")


def test_a_value_that_is_no_text_is_refused(store: ClaimCheck) -> None:
    with pytest.raises(InvalidEvent, match="event value: not valid text"):
        store.check_in(Event(topic="t", key="k", value="\ud800" * 1_000_000))
