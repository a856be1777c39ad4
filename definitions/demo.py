"""`make demo`: real servers, the Dagster UI with this code location, and events there and back again.

A Spark asset writes flights and their events; the harvester relays them; the asset `carrier_delays` consumes them with
Spark, and its check compares the delays that came by way of Kafka with the flights.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from dagster import AssetCheckEvaluation, DagsterEventType, DagsterInstance, DagsterRunStatus, RunsFilter
from dagster_graphql import DagsterGraphQLClient
from rich.console import Console
from rich.table import Table

from outbox_plugin.dagster.daemon import Daemon
from outbox_plugin.dagster.range_config import CONSUMER_TAG
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.kafka import EmbeddedKafka, MockKafka
from outbox_plugin.embedded.server import GuardedServer
from outbox_plugin.embedded.stack import DEFAULT_STATE_DIR, EmbeddedStack
from outbox_plugin.errors import OutboxError
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings
from outbox_plugin.status.reader import read_status
from outbox_plugin.verification.topic_reader import verify_topic
from outbox_plugin.verification.verdict import TopicVerdict

CHECKOUT = Path(__file__).resolve().parent.parent
TOPIC, CONSUMER = "departures", "carrier_delays"
PREFERRED_PORT = 3000
RUN_SECONDS, CONSUMED_SECONDS, START_SECONDS, STOP_SECONDS = 900.0, 900.0, 120.0, 30.0
# Of Spark's Kafka source: the version of its companion that every registry has.
PACKAGES = "org.apache.spark:spark-sql-kafka-0-10_2.13,org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0"
NO_ROUND_TRIP = "not shown: the mock broker does not say where a topic ends"
console = Console(highlight=False)


class DemoFailed(OutboxError):
    """Something did not happen in time; the message says what."""


@dataclass(frozen=True)
class Shown:
    """What the demo has seen: in the database, in Dagster, and as a consumer of the topic."""

    rows: int
    events: int
    verdict: TopicVerdict
    run_status: DagsterRunStatus
    checks: dict[str, bool]
    differences: str | None
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether everything is as promised."""
        complete = 0 < self.events == self.verdict.records and self.verdict.in_order
        succeeded = self.run_status is DagsterRunStatus.SUCCESS
        return complete and succeeded and self.differences is None and bool(self.checks) and all(self.checks.values())


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--once", action="store_true", help="End after the summary; exit 0 only if every check passed.")
    once = parser.parse_args().once
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Both end everything that was started.
    os.chdir(CHECKOUT)
    try:
        with ExitStack() as opened:
            settings, kafka = opened.enter_context(_servers())
            ui = opened.enter_context(_dagster(settings))
            shown = _show(settings, ui, is_mock=isinstance(kafka, MockKafka))
            _summarise(shown)
            if not once:
                console.print(f"The Dagster UI stays up at [bold]{ui}[/bold] until Ctrl-C.")
                signal.pause()
    except KeyboardInterrupt:
        return 0 if not once else 130
    except OutboxError as error:
        console.print(f"demo: {error}", style="red")
        return error.exit_code
    return 0 if shown.passed else 1


@contextmanager
def _servers() -> Iterator[tuple[Settings, EmbeddedKafka | MockKafka]]:
    """Postgres and Kafka, migrated, with the topic; this process's environment names them."""
    with _Line("starting Postgres and Kafka") as line, ExitStack() as opened:
        stack = EmbeddedStack(CHECKOUT / DEFAULT_STATE_DIR, line.say)
        endpoints = opened.enter_context(stack)
        os.environ["OUTBOX_DSN"] = endpoints.dsn
        os.environ["OUTBOX_BOOTSTRAP_SERVERS"] = endpoints.bootstrap_servers
        os.environ.setdefault("OUTBOX_SPARK_PACKAGES", PACKAGES)
        settings = Settings()
        line.say("migrating")
        migrate(settings)
        _create_topic(settings)
        line.done(f"Postgres and Kafka run; {stack.folder / 'endpoints.json'} says how to reach them")
        running = opened.pop_all()
    with running:
        yield settings, stack.kafka


def _create_topic(settings: Settings) -> None:
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    [future] = admin.create_topics([NewTopic(TOPIC, num_partitions=3)], operation_timeout=20).values()
    try:
        future.result(30)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise DemoFailed(f"the topic {TOPIC} could not be made: {error.args[0].str()}") from error
    except TimeoutError:
        raise DemoFailed(f"the topic {TOPIC} could not be made: the broker does not answer") from None


@contextmanager
def _dagster(settings: Settings) -> Iterator[str]:
    """`dagster dev` with this checkout's workspace; its address. Ends the harvester's daemon with it."""
    state = CHECKOUT / DEFAULT_STATE_DIR
    home = state / "dagster"
    home.mkdir(parents=True, exist_ok=True)
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    os.environ["DAGSTER_HOME"] = str(home)
    os.environ["XDG_STATE_HOME"] = str(state)
    port = free_port(PREFERRED_PORT)
    address = f"http://127.0.0.1:{port}"
    command = ["-m", "dagster", "dev", "--workspace", "workspace.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with _Line("starting the Dagster UI") as line:
        server = GuardedServer("Dagster", [sys.executable, *command], state / "dagster.log", stop_signal="SIGINT")
        try:
            server.wait_until(lambda: _answers(f"{address}/server_info"), START_SECONDS)
            line.done(f"the Dagster UI runs: {address}")
            yield address
        finally:
            server.stop()
            _end_harvester(Daemon.of(settings))


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - our own address.
        return bool(answer.status == 200)
    return False


def _end_harvester(daemon: Daemon) -> None:
    daemon.release()
    deadline = time.monotonic() + STOP_SECONDS
    while daemon.running and time.monotonic() < deadline:
        time.sleep(0.1)


def _show(settings: Settings, ui: str, *, is_mock: bool) -> Shown:
    """Materialize the asset as a user would in the UI, and follow its events to the topic."""
    began = time.monotonic()
    host, port = ui.removeprefix("http://").split(":")
    client = DagsterGraphQLClient(host, port_number=int(port))
    with _Line("materializing the Spark asset") as line, DagsterInstance.get() as instance:
        run_id = client.submit_job_execution("__ASSET_JOB", asset_selection=["departures"])
        run_status = _follow(settings, instance, run_id, line)
        rows, events = _written(settings, run_id)
        line.say("reading the topic as a consumer would")
        verdict = verify_topic(settings, TOPIC, job=run_id)
        checks = _checks(instance, run_id)
        differences = NO_ROUND_TRIP if is_mock else _round_trip(settings, instance, run_id, line)
        seconds = time.monotonic() - began
        line.done(f"run {run_id}: {run_status.value}")
    return Shown(rows, events, verdict, run_status, checks, differences, seconds)


def _round_trip(settings: Settings, instance: DagsterInstance, run_id: str, line: _Line) -> str | None:
    """Wait until the sensor has had Spark consume all events of the run; what the check that compares them says then.

    Returns:
        None where it passed; else what it says is wrong.
    """
    deadline = time.monotonic() + CONSUMED_SECONDS
    said = "no range was consumed"
    while time.monotonic() < deadline:
        for found in _comparisons(instance, run_id):
            compared = found.metadata.get("compared")
            if found.passed and compared is not None and compared.value:
                return None
            said = found.description or ""
        line.say(f"from Kafka by Spark into the table of delays: {_consumed(settings, run_id):,} events so far")
        time.sleep(0.3)
    return said


def _consumed(settings: Settings, run_id: str) -> int:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection, suppress(psycopg.errors.UndefinedTable):
        row = connection.execute("SELECT sum(flights)::bigint FROM carrier_delay WHERE job = %s", (run_id,)).fetchone()
        return (row and row[0]) or 0
    return 0  # Before the first range.


def _comparisons(instance: DagsterInstance, run_id: str) -> list[AssetCheckEvaluation]:
    """What the check said of the run's events, the latest first."""
    runs = instance.get_run_records(RunsFilter(tags={CONSUMER_TAG: CONSUMER}), limit=10)
    evaluations = [each for run in runs for each in _evaluations(instance, run.dagster_run.run_id)]
    return [each for each in evaluations if (job := each.metadata.get("job")) is not None and job.value == run_id]


def _follow(settings: Settings, instance: DagsterInstance, run_id: str, line: _Line) -> DagsterRunStatus:
    """Wait for the run's end, saying how far rows and records are."""
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline:
        run = instance.get_run_by_id(run_id)
        if run is not None and run.is_finished:
            return run.status
        _, events = _written(settings, run_id)
        status = read_status(settings, timeout_seconds=2)
        if events and status.backlog is not None:
            relayed = max(0, events - status.backlog)
            line.say(f"{relayed:,} of {events:,} events relayed, {status.backlog:,} wait")
        else:
            line.say(f"the run is {run.status.value.lower() if run else 'queued'}; Spark reads and stages the flights")
        time.sleep(0.3)
    raise DemoFailed(f"the run {run_id} did not end within {RUN_SECONDS:.0f} s; see .outbox/dagster.log")


def _written(settings: Settings, run_id: str) -> tuple[int, int]:
    """How many rows are in the business table, and how many events the run has committed."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        job = connection.execute("SELECT events FROM outbox_job WHERE job_id = %s", (run_id,)).fetchone()
        if job is None:
            return 0, 0
        rows = connection.execute("SELECT count(*) FROM flight").fetchone()
    return (rows[0] if rows else 0), job[0]


def _checks(instance: DagsterInstance, run_id: str) -> dict[str, bool]:
    return {evaluation.check_name: evaluation.passed for evaluation in _evaluations(instance, run_id)}


def _evaluations(instance: DagsterInstance, run_id: str) -> list[AssetCheckEvaluation]:
    logs = instance.all_logs(run_id, of_type=DagsterEventType.ASSET_CHECK_EVALUATION)
    return [log.dagster_event.asset_check_evaluation_data for log in logs if log.dagster_event]


def _summarise(shown: Shown) -> None:
    table = Table(title="passed" if shown.passed else "FAILED", title_style="green" if shown.passed else "red")
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in (
        ("rows written", f"{shown.rows:,}"),
        ("events emitted", f"{shown.events:,}"),
        ("records relayed", f"{shown.verdict.records:,}"),
        ("duplicates", f"{shown.verdict.duplicates:,}"),
        ("order violations", f"{shown.verdict.order_violations:,}"),
        ("delays per carrier, there and back", "agree" if shown.differences is None else shown.differences),
        ("seconds", f"{shown.seconds:.1f}"),
        *((f"check {name}", "passed" if passed else "FAILED") for name, passed in shown.checks.items()),
    ):
        table.add_row(name, value)
    console.print(table)


class _Line:
    """One line of progress: in place on a terminal; elsewhere a new line every few seconds."""

    EVERY_SECONDS = 3.0

    def __init__(self, text: str) -> None:
        self._status = console.status(text) if console.is_terminal else None
        self._said_at = 0.0
        self._began = time.monotonic()
        self._text = text

    def __enter__(self) -> _Line:
        if self._status:
            self._status.start()
        else:
            console.print(f"{self._text} …")
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def say(self, text: str) -> None:
        """Show where it is."""
        if text.startswith("warning"):
            console.print(text, style="yellow")
        elif self._status:
            self._status.update(text)
        elif time.monotonic() - self._said_at > self.EVERY_SECONDS:
            self._said_at = time.monotonic()
            console.print(text)

    def done(self, text: str) -> None:
        """Show that it is done."""
        if self._status:
            self._status.stop()
        console.print(f"{text} ({time.monotonic() - self._began:.1f} s)")


if __name__ == "__main__":
    sys.exit(main())
