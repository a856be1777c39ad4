"""One trace from emit through the relay to the handler of an inbox, on real servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanContext, StatusCode, Tracer

from outbox_plugin import Event, Harvester, Outbox, Settings
from outbox_plugin.inbox import Inbox, Received, Retry
from tests.harvesting import consume, drained
from tests.inbox_support import effects, query, record_effect
from tests.support import eventually
from tests.tracing import Exported, context_of, linked, parent_of, recorded_tracer

pytestmark = pytest.mark.integration

SOON = 30.0
IMPATIENT = Retry(attempts=3, first_seconds=0.05, most_seconds=0.1)
MALFORMED = ["", "mine", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "00-" + "Z" * 52]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Exported:
    return Exported(monkeypatch)


def emit(settings: Settings, *events: Event, tracer: Tracer | None = None) -> list[SpanContext]:
    """Emit each event in a span of its own, all in one transaction; the spans' contexts."""
    contexts, outbox = [], Outbox()
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        for event in events:
            with (tracer or recorded_tracer()).start_as_current_span("place order") as span:
                outbox.emit(connection, event)
                contexts.append(span.get_span_context())
    return contexts


def events(topic: str, *values: str) -> list[Event]:
    """An event for each value, each with a key of its own."""
    return [Event(topic=topic, key=f"k{number}", value=value) for number, value in enumerate(values)]


def relay(settings: Settings) -> None:
    """Relay all rows; they are read together."""
    with Harvester(settings):
        drained(settings)


def consumed(settings: Settings, topic: str, handler: Any, done: Callable[[], object], **options: Any) -> None:
    """Run an inbox until something is done."""
    with Inbox(settings, group=f"{topic}-readers", topics=[topic], handler=handler, retry=IMPATIENT, **options):
        eventually(done, SOON)


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_one_trace_leads_from_emit_through_the_relay_to_the_handler(
    ready: Settings, topic: str, exported: Exported, delivery: str
) -> None:
    current: list[SpanContext] = []

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        current.append(trace.get_current_span().get_span_context())
        record_effect(connection, event)
        Outbox().emit(connection, Event(topic="replies", key="k", value="reply"))

    [place_order] = emit(ready, Event(topic=topic, key="k", value="secret"))
    relay(ready.model_copy(update={"delivery": delivery}))
    consumed(ready, topic, handle, lambda: effects(ready))
    [wait], [send], [process] = (exported.of(operation) for operation in ("wait", "send", "process"))
    assert {context_of(span).trace_id for span in (wait, send, process)} == {place_order.trace_id}
    assert [parent_of(span) for span in (wait, send, process)] == [place_order.span_id] * 3
    assert linked(send) == linked(process) == [place_order.span_id]
    assert linked(wait) == [context_of(send).span_id]
    assert (wait.start_time or 0) < (wait.end_time or 0) == (send.start_time or 0) < (send.end_time or 0)
    assert current == [context_of(process)]
    assert process.status.status_code == StatusCode.UNSET
    assert (process.attributes or {})["messaging.consumer.group.name"] == f"{topic}-readers"
    assert not any("secret" in span.to_json() for span in exported.spans)
    [(names, texts)] = query(ready, "SELECT kafka_header_keys, kafka_header_values FROM outbox")
    _, trace_id, span_id, _ = dict(zip(names, texts, strict=True))["traceparent"].split("-")
    assert (int(trace_id, 16), int(span_id, 16)) == (place_order.trace_id, current[0].span_id)


async def _nothing_async(_connection: psycopg.AsyncConnection[Any], _event: Received | list[Received]) -> None:
    SEEN.append(trace.get_current_span().get_span_context())


def _nothing(_connection: psycopg.Connection[Any], _event: Received | list[Received]) -> None:
    SEEN.append(trace.get_current_span().get_span_context())


SEEN: list[SpanContext] = []


@pytest.mark.parametrize("handler", [_nothing, _nothing_async])
def test_the_span_is_current_in_each_kind_of_handler(
    ready: Settings, topic: str, exported: Exported, handler: Any
) -> None:
    SEEN.clear()
    traces = emit(ready, *events(topic, "1", "2", "3"))
    relay(ready)
    consumed(ready, topic, handler, lambda: len(exported.of("process")) == 3)
    processes = exported.of("process")
    assert {parent_of(span) for span in processes} == {each.span_id for each in traces}
    assert {context_of(span).span_id for span in processes} == {each.span_id for each in SEEN}


@pytest.mark.parametrize("handler", [_nothing, _nothing_async])
def test_a_batch_is_one_span_that_links_to_all_of_its_events(
    ready: Settings, topic: str, exported: Exported, handler: Any
) -> None:
    SEEN.clear()
    traces = {each.span_id: each for each in emit(ready, *events(topic, *"12345678"))}
    relay(ready)
    [send] = exported.of("send")
    assert linked(send) == [*traces]
    assert {parent_of(wait) for wait in exported.of("wait")} == {*traces}

    def batches_link_to_all() -> bool:
        return {each for span in exported.of("process") for each in linked(span)} == {*traces}

    consumed(ready, topic, handler, batches_link_to_all, batch_size=100)
    processes = exported.of("process")
    assert sum(len(span.links) for span in processes) == 8
    for span in processes:
        first = linked(span)[0]
        assert (parent_of(span), context_of(span).trace_id) == (first, traces[first].trace_id)
        assert (span.attributes or {})["messaging.batch.message_count"] == len(span.links)
    assert {context_of(span).span_id for span in processes} == {each.span_id for each in SEEN}


def test_traces_that_are_not_recorded_make_no_spans_and_go_on(ready: Settings, topic: str, exported: Exported) -> None:
    SEEN.clear()
    unrecorded = TracerProvider(sampler=ALWAYS_OFF).get_tracer("application")
    [place_order] = emit(ready, *events(topic, "1"), tracer=unrecorded)
    relay(ready)
    consumed(ready, topic, _nothing, lambda: SEEN)
    assert [(each.trace_id, each.span_id) for each in SEEN] == [(place_order.trace_id, place_order.span_id)]
    assert not SEEN[0].trace_flags.sampled
    assert not exported.spans


def test_a_malformed_traceparent_harms_nothing(ready: Settings, topic: str, exported: Exported) -> None:
    malformed = [
        Event(topic=topic, key=f"k{number}", value="1", headers={"traceparent": text})
        for number, text in enumerate(MALFORMED)
    ]
    emit(ready, *malformed)
    relay(ready)
    consumed(ready, topic, record_effect, lambda: len(effects(ready)) == len(MALFORMED))
    assert not exported.spans


def test_a_transaction_that_is_aborted_and_tried_again_makes_spans_of_what_was_committed_alone(
    ready: Settings, group: str, exported: Exported
) -> None:
    """The broker refuses a whole batch for one row, which is found out by several transactions."""
    topic = f"{group}-narrow"
    admin = AdminClient({"bootstrap.servers": ready.bootstrap_servers})
    [made] = admin.create_topics([NewTopic(topic, num_partitions=1, config={"max.message.bytes": "20000"})]).values()
    made.result(60)
    *good, bad = emit(ready, *events(topic, *(str(each) for each in range(50)), "x" * 50_000))
    relay(ready.model_copy(update={"bad_rows": "dead-letter"}))
    assert len(consume(ready, topic)) == 50
    assert sorted(parent_of(span) or 0 for span in exported.of("wait")) == sorted(each.span_id for each in good)
    links = [each for span in exported.of("send") for each in linked(span)]
    assert sorted(links) == sorted(each.span_id for each in good)
    assert bad.trace_id not in {context_of(span).trace_id for span in exported.spans}


def runs_of(exported: Exported, event: SpanContext) -> Sequence[tuple[bool, str | None]]:
    """Whether each run of the handler with the event failed, and what its span says."""
    return [
        (span.status.status_code == StatusCode.ERROR, span.status.description)
        for span in exported.of("process")
        if parent_of(span) == event.span_id
    ]


def test_a_run_whose_transaction_was_rolled_back_says_so_and_the_next_one_counts(
    ready: Settings, topic: str, exported: Exported
) -> None:
    """The handler fails once, on an event that shares its transaction with the one before."""
    runs: list[tuple[int, str]] = []  # The transaction, and the event's value.
    failed: list[str] = []

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        [(transaction,)] = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchall()
        runs.append((transaction, (event.value or b"").decode()))
        if not failed and [each for each, _ in runs[-2:]] == [transaction] * 2:
            failed.extend(value for _, value in runs[-2:])
            raise RuntimeError("once")
        record_effect(connection, event)

    values = [str(number) for number in range(300)]
    emitted = dict(zip(values, emit(ready, *events(topic, *values)), strict=True))
    relay(ready)
    consumed(ready, topic, handle, lambda: len(effects(ready)) == 300, concurrency=1)
    undone, guilty = failed
    assert runs_of(exported, emitted[guilty]) == [(True, "RuntimeError: once"), (False, None)]
    assert runs_of(exported, emitted[undone]) == [(True, "the transaction was not committed"), (False, None)]
    assert len(exported.of("process")) == len(runs)
