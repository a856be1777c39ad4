"""An asset that consumes a topic range by range, on the requests of its sensor: each record's effect once."""

import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from dagster import (
    AssetCheckEvaluation,
    AssetKey,
    AssetObservation,
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    Definitions,
    EnvVar,
    ExecuteInProcessResult,
    MaterializeResult,
    RunRequest,
    SensorDefinition,
    asset,
    build_sensor_context,
)
from dagster._core.definitions.sensor_definition import SensorExecutionData

from outbox_plugin import Settings
from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.consuming import Received, consume_range
from outbox_plugin.dagster import (
    OutboxResource,
    RangeConfig,
    build_position_job,
    build_topic_check,
    build_topic_sensor,
)
from outbox_plugin.errors import InvalidSetting
from tests.documents import blocks
from tests.harvesting import create_topic
from tests.inbox_support import make_effect_table, produce, query
from tests.integration.test_consuming import add, numbered, values
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration


class Shop:
    """A code location with one asset that consumes one topic, and a clock of its own."""

    def __init__(self, settings: Settings, topic: str, instance: DagsterInstance, most: int) -> None:
        self.settings, self.topic, self.instance = settings, topic, instance
        self.fails = 0
        self.outbox = OutboxResource(
            dsn=settings.dsn.get_secret_value(), bootstrap_servers=settings.bootstrap_servers, group=settings.group
        )

        def handle(connection: psycopg.Connection[Any], records: Sequence[Received]) -> None:
            add(connection, records)
            if self.fails:
                self.fails -= 1
                raise RuntimeError("the run fails half-way")

        @asset
        def totals(config: RangeConfig, outbox: OutboxResource) -> MaterializeResult[None]:
            return MaterializeResult(metadata=consume_range(outbox.settings(), config.range(), handle).metadata)

        self.sensor = build_topic_sensor(topic, totals, max_records=most, max_wait_seconds=0)
        self.definitions = Definitions(
            assets=[totals],
            sensors=[self.sensor],
            asset_checks=[build_topic_check(topic, totals)],
            jobs=[build_position_job(topic, totals)],
            resources={"outbox": self.outbox},
        )
        self.cursor: str | None = None
        self.seconds = 0.0
        self.ticked: SensorExecutionData | None = None

    def tick(self) -> list[RunRequest]:
        """One tick of the sensor; what it requests."""
        with build_sensor_context(
            instance=self.instance, cursor=self.cursor, definitions=self.definitions, resources={"outbox": self.outbox}
        ) as context:
            began = time.monotonic()
            self.ticked = self.sensor.evaluate_tick(context)
            self.seconds = time.monotonic() - began
        self.cursor = self.ticked.cursor
        return list(self.ticked.run_requests or [])

    def create_run(self, request: RunRequest) -> DagsterRun:
        """The run that was requested, which nobody launches."""
        job = self.definitions.resolve_implicit_global_asset_job_def()
        return self.instance.create_run_for_job(job, run_config=request.run_config, tags=request.tags)

    def run(self, request: RunRequest, instance: DagsterInstance | None = None) -> ExecuteInProcessResult:
        """As a run of the request's, and as one that is executed again."""
        return self.definitions.resolve_implicit_global_asset_job_def().execute_in_process(
            run_config=dict(request.run_config),
            tags=dict(request.tags),
            asset_selection=[AssetKey("totals")],
            instance=instance or self.instance,
            raise_on_error=False,
        )

    def evaluated(self) -> AssetCheckEvaluation:
        """The check, as Dagster runs it."""
        config = {"consumer": "x", "topic": "x", "topic_id": "x", "begin": {}, "end": {}}
        done = self.definitions.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=self.instance, run_config={"ops": {"totals": {"config": config}}}, raise_on_error=False
        )
        [evaluation] = done.get_asset_check_evaluations()
        return evaluation

    def consume(self) -> int:
        """Tick and run until nothing is requested; how many runs there were."""
        runs = 0
        while requests := self.tick():
            for request in requests:
                assert self.run(request).success
                runs += 1
        return runs

    @property
    def skipped(self) -> str:
        assert self.ticked is not None
        return self.ticked.skip_message or ""

    @property
    def observed(self) -> dict[str, Any]:
        assert self.ticked is not None
        [found] = [each for each in self.ticked.asset_events if isinstance(each, AssetObservation)]
        return {name: value.value for name, value in found.metadata.items()}

    @property
    def check(self) -> AssetCheckEvaluation:
        assert self.ticked is not None
        [found] = [each for each in self.ticked.asset_events if isinstance(each, AssetCheckEvaluation)]
        return found

    def metadata(self, done: ExecuteInProcessResult) -> dict[str, Any]:
        [event] = done.asset_materializations_for_node("totals")
        return {name: value.value for name, value in event.metadata.items()}


@pytest.fixture
def instance() -> Iterator[DagsterInstance]:
    with DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def shop(settings: Settings, topic: str, instance: DagsterInstance) -> Shop:
    make_effect_table(settings)
    return Shop(settings, topic, instance, 40)


def an_hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    later = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: later)


def test_a_day_of_records_is_consumed_range_by_range(shop: Shop) -> None:
    assert shop.tick() == []
    assert shop.skipped == "everything has been consumed"
    produce(shop.settings, shop.topic, numbered(0, 130))
    [request] = shop.tick()
    assert (shop.observed["lag_offsets"], shop.observed["requests"]) == (130, 1)
    told = shop.metadata(shop.run(request))
    assert (told["records"], told["offsets"], told["lost_offsets"], told["consumed_before"]) == (40, 40, 0, False)
    assert told["range"]["topic"] == shop.topic
    assert shop.consume() == 3
    assert values(shop.settings) == list(range(130))
    assert (shop.observed["lag_offsets"], shop.check.passed) == (0, True)


def test_a_lost_cursor_changes_nothing(shop: Shop) -> None:
    produce(shop.settings, shop.topic, numbered(0, 100))
    for _ in range(3):
        [request] = shop.tick()
        shop.run(request)
        shop.cursor = "no cursor of ours"
    assert shop.tick() == []
    assert values(shop.settings) == list(range(100))


def test_one_range_is_in_flight_also_where_two_sensors_ask(shop: Shop) -> None:
    produce(shop.settings, shop.topic, numbered(0, 100))
    [request] = shop.tick()
    waits = shop.create_run(request)
    assert shop.tick() == []
    assert f"the run {waits.run_id} is not_started" in shop.skipped
    second = Shop(shop.settings, shop.topic, shop.instance, 40)
    assert second.tick() == []
    shop.instance.report_run_canceled(waits)
    assert shop.tick() == []
    assert "1 runs from this position ended without effect" in shop.skipped
    assert len(second.tick()) == 1


def test_a_run_that_nobody_launches_does_not_hold_up_its_range_for_ever(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who made it was killed before it was launched; Dagster leaves it as not started."""
    produce(shop.settings, shop.topic, numbered(0, 100))
    [request] = shop.tick()
    left = shop.create_run(request)
    assert shop.tick() == []
    assert f"the run {left.run_id} is not_started" in shop.skipped
    an_hour_later(monkeypatch)
    [again] = shop.tick()
    assert shop.run(again).success
    late = shop.metadata(shop.run(request))  # It is launched after all.
    assert (late["records"], late["consumed_before"]) == (0, True)
    shop.consume()
    assert values(shop.settings) == list(range(100))


def test_a_run_whose_process_was_killed_is_waited_for_and_told_of(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without run_monitoring, Dagster leaves it as started."""
    produce(shop.settings, shop.topic, numbered(0, 100))
    [request] = shop.tick()
    killed = shop.create_run(request)
    for began in (DagsterEventType.RUN_STARTING, DagsterEventType.RUN_START):
        shop.instance.report_dagster_event(DagsterEvent(began.value, killed.job_name), killed.run_id)
    assert shop.tick() == []
    at_first = shop.check
    assert at_first.passed  # It may be at work.
    an_hour_later(monkeypatch)
    assert shop.tick() == []
    late = shop.check
    assert not late.passed
    assert f"the run {killed.run_id} is started" in (late.description or "")
    assert "terminate the run" in str(late.metadata["what_to_do"].value)
    assert not shop.evaluated().passed
    shop.instance.report_run_canceled(shop.instance.get_run_by_id(killed.run_id) or killed)
    shop.cursor = None
    assert len(shop.tick()) == 1
    assert shop.check.passed


def test_a_failed_range_is_requested_again_and_nothing_is_left_out(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    produce(shop.settings, shop.topic, numbered(0, 100))
    shop.fails = 1
    [request] = shop.tick()
    assert not shop.run(request).success
    assert values(shop.settings) == []
    assert shop.tick() == []
    an_hour_later(monkeypatch)
    [again] = shop.tick()
    assert again.run_config == request.run_config
    assert shop.run(again).success
    shop.consume()
    shop.run(request)  # Somebody executes the failed run again.
    assert values(shop.settings) == list(range(100))


def test_a_run_that_dagster_will_retry_is_waited_for(shop: Shop) -> None:
    produce(shop.settings, shop.topic, numbered(0, 100))
    [request] = shop.tick()
    shop.fails = 1
    failed = shop.run(request)
    shop.cursor = None
    shop.instance.add_run_tags(failed.run_id, {"dagster/will_retry": "true"})
    assert shop.tick() == []
    assert "Dagster will retry it" in shop.skipped
    shop.instance.add_run_tags(failed.run_id, {"dagster/auto_retry_run_id": "another"})
    assert len(shop.tick()) == 1


def test_runs_of_one_request_at_the_same_time_and_afterwards_have_one_effect(shop: Shop) -> None:
    produce(shop.settings, shop.topic, numbered(0, 40))
    [request] = shop.tick()

    def run(_: int) -> ExecuteInProcessResult:
        with DagsterInstance.ephemeral() as own:  # One in memory takes one writer.
            return shop.run(request, own)

    with ThreadPoolExecutor(3) as runs:
        done = list(runs.map(run, range(3)))
    assert all(each.success for each in done)
    assert sorted(shop.metadata(each)["consumed_before"] for each in done) == [False, True, True]
    assert shop.metadata(shop.run(request))["consumed_before"]
    assert values(shop.settings) == list(range(40))


def test_a_backfill_consumes_an_old_range_again(shop: Shop) -> None:
    produce(shop.settings, shop.topic, numbered(0, 40))
    [request] = shop.tick()
    shop.run(request)
    config = {**request.run_config["ops"]["totals"]["config"], "backfill": "mended"}
    backfill = RunRequest(run_config={"ops": {"totals": {"config": config}}})
    told = [shop.metadata(shop.run(backfill))["consumed_before"] for _ in range(2)]
    assert told == [False, True]
    assert values(shop.settings) == sorted([*range(40), *range(40)])
    assert shop.tick() == []


def test_what_kafka_deleted_is_passed_over_and_the_check_fails_until_that_is_acknowledged(shop: Shop) -> None:
    produce(shop.settings, shop.topic, numbered(0, 60))
    admin = AdminClient({"bootstrap.servers": shop.settings.bootstrap_servers})
    shop.consume()
    produce(shop.settings, shop.topic, numbered(60, 30))
    futures = admin.delete_records([TopicPartition(shop.topic, each, -1) for each in range(3)])
    for future in futures.values():
        future.result(60)
    produce(shop.settings, shop.topic, numbered(90, 10))
    assert len(shop.tick()) == 1
    assert not shop.check.passed
    assert "Kafka has deleted 30 offsets" in (shop.check.description or "")
    shop.cursor = None
    shop.consume()
    assert values(shop.settings) == [*range(60), *range(90, 100)]
    assert not shop.check.passed
    assert shop.observed["lost_offsets"] == 30
    job = shop.definitions.resolve_job_def("totals_position")
    assert job.execute_in_process(instance=shop.instance).success
    assert shop.tick() == []
    assert shop.check.passed


def test_a_recreated_topic_stops_the_sensor_until_the_position_is_set(shop: Shop) -> None:
    produce(shop.settings, shop.topic, numbered(0, 20))
    shop.consume()
    query(shop.settings, "UPDATE outbox_consumer_position SET topic_id = 'another'")
    produce(shop.settings, shop.topic, numbered(20, 20))
    assert shop.tick() == []
    assert "was deleted and recreated" in shop.skipped
    assert not shop.check.passed
    job = shop.definitions.resolve_job_def("totals_position")
    config = {"ops": {"set_totals_position": {"config": {"where": "end"}}}}
    assert job.execute_in_process(instance=shop.instance, run_config=config).success
    produce(shop.settings, shop.topic, numbered(40, 20))
    assert shop.consume() == 1
    assert values(shop.settings) == [*range(20), *range(40, 60)]


def test_a_deleted_topic_fails_the_check_of_a_consumer_that_had_begun(shop: Shop) -> None:
    """Its records are gone for good; the topic of a new consumer may only not be there yet."""
    produce(shop.settings, shop.topic, numbered(0, 20))
    shop.consume()
    with closing(KafkaAdmin(shop.settings)) as admin:
        admin.client.delete_topics([shop.topic])[shop.topic].result(30)

    def gone() -> bool:
        return not shop.tick() and "cannot be read" in shop.skipped

    eventually(gone, 30)
    assert not shop.check.passed
    assert "see that the topic is there" in str(shop.check.metadata["what_to_do"].value)
    ran = shop.evaluated()
    assert not ran.passed
    assert "cannot be read" in str(ran.metadata["explanation"].value)
    query(shop.settings, "DELETE FROM outbox_consumer_position")
    assert gone()
    assert shop.ticked is not None
    assert not shop.ticked.asset_events


def test_the_check_that_dagster_runs_agrees(shop: Shop) -> None:
    produce(shop.settings, shop.topic, numbered(0, 20))
    shop.consume()
    evaluation = shop.evaluated()
    assert evaluation.passed
    assert evaluation.metadata["lag_offsets"].value == 0


def test_a_tick_never_waits_for_servers_that_do_not_answer(
    settings: Settings, topic: str, instance: DagsterInstance
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for changed in ({"bootstrap_servers": f"127.0.0.1:{port}"}, {"dsn": f"postgresql://x@127.0.0.1:{port}/x"}):
            given = {"dsn": settings.dsn.get_secret_value(), "bootstrap_servers": settings.bootstrap_servers, **changed}
            shop = Shop(Settings(**given, group=settings.group), topic, instance, 10)
            shop.cursor = "{}"
            assert shop.tick() == []
            assert shop.seconds < 2.0 * PATIENCE
            assert "did not answer in time" in shop.skipped or "Kafka" in shop.skipped
            assert shop.cursor == "{}"


def test_a_range_that_is_wrong_is_said_in_one_line(shop: Shop) -> None:
    produce(shop.settings, shop.topic, numbered(0, 40))
    [request] = shop.tick()
    config = {**request.run_config["ops"]["totals"]["config"], "begin": {"first": 1}}
    failed = shop.run(RunRequest(run_config={"ops": {"totals": {"config": config}}}))
    [event] = failed.filter_events(lambda each: each.is_step_failure)
    assert "partitions are numbers" in str(event.step_failure_data.error)


def test_the_page_shows_an_asset_that_consumes(
    settings: Settings, group: str, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block of the page, run as it stands, but for the topic's name."""
    topic = create_topic(settings, f"{group}-orders")
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    query(settings, "CREATE TABLE customer_total (customer TEXT PRIMARY KEY, orders BIGINT)")
    names: dict[str, Any] = {}
    page = blocks("how-to/consume-in-dagster-and-spark.md", "python")
    text = page[0].text.replace('"orders", customer_totals', f'"{topic}", customer_totals')
    exec(compile(text, "consuming.md", "exec"), names)
    definitions: Definitions = names["definitions"]
    Definitions.validate_loadable(definitions)
    produce(settings, topic, numbered(0, 70))
    [sensor] = list(definitions.sensors or ())
    assert isinstance(sensor, SensorDefinition)
    cursor = None
    for number in (0, 61, 122):
        later = time.time() + number
        monkeypatch.setattr(time, "time", lambda later=later: later)
        outbox = OutboxResource(dsn=EnvVar("OUTBOX_DSN"), bootstrap_servers=EnvVar("OUTBOX_BOOTSTRAP_SERVERS"))
        with build_sensor_context(
            instance=instance, cursor=cursor, definitions=definitions, resources={"outbox": outbox}
        ) as context:
            ticked = sensor.evaluate_tick(context)
        cursor = ticked.cursor
        for request in ticked.run_requests or []:
            job = definitions.resolve_implicit_global_asset_job_def()
            assert job.execute_in_process(run_config=dict(request.run_config), instance=instance).success
    assert query(settings, "SELECT sum(orders)::int, count(*) FROM customer_total") == [(70, 7)]


@pytest.mark.parametrize("wrong", [{"topic": "with space"}, {"max_records": 0}, {"max_wait_seconds": -1}])
def test_a_wrong_declaration_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        build_topic_sensor(**{"topic": "orders", "asset": "totals", **wrong})
