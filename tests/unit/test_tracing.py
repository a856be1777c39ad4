"""Which rows and records are traced, what their spans say, and that nothing is made where nobody traces."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import SpanKind, StatusCode

from outbox_plugin.core.row import OutboxRow, Rows
from outbox_plugin.core.span_attributes import operation_attributes, record_attributes, span_name
from outbox_plugin.core.trace_context import MAX_LINKS, carrier, sampled_rows, wait_began
from outbox_plugin.inbox.process_span import process_span
from outbox_plugin.inbox.received import Received
from outbox_plugin.inbox.session import Events, HandlerSession
from outbox_plugin.inbox.traced_session import TracedSession
from outbox_plugin.observe.relay_spans import RelaySpans
from outbox_plugin.observe.tracing import configured_tracer
from outbox_plugin.relay.events import WindowPublished
from tests.tracing import Exported, context_of, linked, parent_of, traceparent

NOW = 1_800_000_000_000_000_000
POSTGRES_NOW = NOW // 1_000 - 946_684_800_000_000
MALFORMED = [
    "",
    "mine",
    "x" * 55,
    "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
    "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
    "00-" + "G" * 32 + "-" + "1" * 16 + "-01",
    "ff-" + "1" * 32 + "-" + "1" * 16 + "-01",
    "00-" + "1" * 32 + "-" + "1" * 16 + "-01-more",
    "00-" + "1" * 32 + "-" + "1" * 16 + "-01" + "-" * 1_000,
    "00_" + "é" * 51 + "1",
]


def row(id_: int, parent: str | None = None, topic: str = "orders", **fields: Any) -> OutboxRow:
    names, texts = (["event-type"], ["Placed"]) if parent is None else (["a", "traceparent"], ["b", parent])
    return OutboxRow(id_, POSTGRES_NOW - 2_000_000, topic, "k", "secret", names, texts, 0)._replace(**fields)


def received(parent: str | None = None, **fields: Any) -> Received:
    headers = () if parent is None else (("traceparent", parent.encode()),)
    given: dict[str, Any] = {"topic": "orders", "partition": 1, "offset": 7, "key": b"k", "value": b"secret"}
    return Received(timestamp=0, headers=headers, idempotency_key="e", **(given | fields))


def published(*rows: OutboxRow, seconds: float = 3.0, sending: float = 0.5) -> WindowPublished:
    return WindowPublished(0, len(rows), seconds, sending, Rows(rows))


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Exported:
    return Exported(monkeypatch)


def relay_spans() -> RelaySpans:
    tracer = configured_tracer()
    assert tracer is not None
    return RelaySpans(tracer, lambda: NOW)


def test_no_tracer_is_had_where_the_sdk_is_not_set_up_or_off_or_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert configured_tracer() is None
    monkeypatch.setattr(trace, "get_tracer_provider", trace.NoOpTracerProvider)
    assert configured_tracer() is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    monkeypatch.setattr(trace, "get_tracer_provider", TracerProvider)
    assert configured_tracer() is None
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    assert configured_tracer() is not None
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert configured_tracer() is None


def test_rows_are_chosen_by_the_flag_of_their_traceparent() -> None:
    rows = Rows(
        [
            row(1, traceparent(1, 1)),
            row(2, traceparent(2, 2, sampled=False)),
            row(3),
            row(4, traceparent(4, 4)[:-1] + "3"),
            row(5, header_keys=["traceparent"], header_values=[None]),
            row(6, traceparent(6, 6)),
        ]
    )
    assert [each.id for each in sampled_rows(rows, 9)] == [1, 4, 6]
    assert [each.id for each in sampled_rows(rows, 2)] == [1, 4]
    assert carrier([("tracestate", "a=b"), ("traceparent", "short")]) == {}


@pytest.mark.parametrize(
    ("created", "began"),
    [
        (POSTGRES_NOW - 1, NOW - 1_000),
        (POSTGRES_NOW + 1, NOW),  # The database's clock is ahead.
        (-(2**63), NOW),  # -infinity.
        (2**63 - 1, NOW),
    ],
)
def test_a_wait_ends_after_it_began_whatever_the_clocks_say(created: int, began: int) -> None:
    assert wait_began(created, NOW) == began


def test_attributes_follow_the_conventions() -> None:
    assert span_name("send", {"a"}) == "send a"
    assert span_name("send", {"a", "b"}) == "send"
    assert operation_attributes("send", {"a", "b"}) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
    }
    assert record_attributes(None, is_tombstone=True) == {"messaging.kafka.message.tombstone": True}
    assert process_span(received(), "billing") == (
        "process orders",
        {
            "messaging.system": "kafka",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": "orders",
            "messaging.destination.partition.id": "1",
            "messaging.consumer.group.name": "billing",
            "messaging.kafka.offset": 7,
            "messaging.kafka.message.key": "k",
        },
    )
    name, said = process_span([received(), received(partition=2)], "billing")
    assert name == "process orders"
    assert said["messaging.batch.message_count"] == 2
    assert not said.keys() & {"messaging.destination.partition.id", "messaging.kafka.message.key"}
    assert "messaging.kafka.message.key" not in process_span(received(key=b"\xff"), "billing")[1]


def test_a_window_has_one_send_span_that_links_to_its_traces_and_each_trace_a_wait(exported: Exported) -> None:
    relay_spans().observe(published(row(1), row(2, traceparent(2, 22)), row(3, traceparent(3, 33), value=None)))
    [send], waits = exported.of("send"), exported.of("wait")
    assert (send.name, send.kind, parent_of(send), linked(send)) == ("send orders", SpanKind.CLIENT, 22, [22, 33])
    assert (send.start_time, send.end_time) == (NOW - 500_000_000, NOW)
    assert dict(send.attributes or {})["messaging.batch.message_count"] == 3
    assert [(context_of(each).trace_id, parent_of(each)) for each in waits] == [(2, 22), (3, 33)]
    for wait in waits:
        assert linked(wait) == [context_of(send).span_id]
        assert (wait.start_time, wait.end_time) == (NOW - 2_000_000_000, NOW - 500_000_000)
    assert dict(waits[1].attributes or {}) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "wait",
        "messaging.destination.name": "orders",
        "messaging.kafka.message.key": "k",
        "messaging.kafka.message.tombstone": True,
    }
    assert len(exported.spans) == 3


def test_a_window_makes_a_bounded_number_of_spans(exported: Exported) -> None:
    relay_spans().observe(published(*(row(each, traceparent(each, each)) for each in range(1, 1_000))))
    assert len(exported.spans) == MAX_LINKS + 1
    assert len(exported.of("send")[0].links) == MAX_LINKS


@pytest.mark.parametrize("parent", [None, traceparent(1, 1, sampled=False), *MALFORMED])
def test_rows_whose_traces_are_not_recorded_or_malformed_make_no_spans(
    exported: Exported, caplog: pytest.LogCaptureFixture, parent: str | None
) -> None:
    spans = relay_spans()
    spans.observe(published(row(1, parent)))
    spans.observe(published())
    assert not exported.spans
    assert not caplog.records


class Broken(Sampler):
    """A sampler that fails, which the SDK does not catch."""

    def should_sample(self, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError("no sample")

    def get_description(self) -> str:
        return "broken"


def test_an_error_of_the_tracer_is_logged_and_harms_neither_relay_nor_handler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Exported(monkeypatch, Broken())
    relay_spans().observe(published(row(1, traceparent(1, 1))))
    handled: list[Events] = []
    run(handled.append, received())
    assert handled
    assert [record.getMessage() for record in caplog.records] == [
        "shard 0: a window could not be traced: no sample",
        "a handler could not be traced: no sample",
    ]


class FakeSession:
    """A session whose transactions are committed unless something is raised in them."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        yield

    async def handle(self, events: Events) -> None:
        self._handler(events)


def run(handler: Any, *runs: Events) -> None:
    """Run a handler for each of `runs`, in one transaction."""
    tracer = configured_tracer()
    assert tracer is not None
    session = TracedSession(cast(HandlerSession, FakeSession(handler)), tracer, "billing")

    async def all_runs() -> None:
        async with session.transaction():
            for each in runs:
                await session.handle(each)

    asyncio.run(all_runs())


def test_a_batch_is_in_the_trace_of_its_first_recorded_event_and_links_to_all(exported: Exported) -> None:
    unsampled, sampled = received(traceparent(1, 1, sampled=False)), [received(traceparent(n, n)) for n in (2, 3)]
    run(lambda _: None, [received(), unsampled, *sampled])
    [span] = exported.spans
    assert (span.name, span.kind, parent_of(span), linked(span)) == ("process orders", SpanKind.CONSUMER, 2, [2, 3])


def test_a_batch_links_to_a_bounded_number_of_events(exported: Exported) -> None:
    run(lambda _: None, [received(traceparent(each, each)) for each in range(1, 1_000)])
    [span] = exported.spans
    assert linked(span) == [*range(1, MAX_LINKS + 1)]


def test_a_trace_that_is_not_recorded_goes_on_without_a_span(exported: Exported) -> None:
    seen = []
    run(
        lambda _: seen.append(trace.get_current_span().get_span_context()),
        received(traceparent(5, 6, sampled=False)),
        [received("mine"), received(traceparent(7, 8, sampled=False))],
    )
    assert [(each.trace_id, each.trace_flags.sampled) for each in seen] == [(5, False), (7, False)]
    assert not exported.spans
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.parametrize("parent", [None, *MALFORMED])
def test_an_event_without_a_trace_begins_one_if_the_sampler_wants_it(
    monkeypatch: pytest.MonkeyPatch, parent: str | None
) -> None:
    exported = Exported(monkeypatch)
    run(lambda _: None, received(parent))
    assert not exported.spans
    exported = Exported(monkeypatch, TracerProvider().sampler)
    run(lambda _: None, received(parent))
    [span] = exported.spans
    assert (span.parent, span.links) == (None, ())


def test_the_runs_of_a_transaction_that_is_not_committed_say_so(exported: Exported) -> None:
    def fail_the_second(event: Received) -> None:
        if event.offset == 2:
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        run(fail_the_second, *(received(traceparent(n, n), offset=n) for n in (1, 2)))
    undone, failed = exported.spans
    assert undone.status.status_code == failed.status.status_code == StatusCode.ERROR
    assert undone.status.description == "the transaction was not committed"
    assert failed.status.description == "ValueError: bad"
    assert [dict(each.attributes or {})["error.type"] for each in (undone, failed)] == ["ValueError", "ValueError"]
    assert [event.name for event in failed.events] == ["exception"]
