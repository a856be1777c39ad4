"""The outbox declared in YAML and in one call: what definitions come of it, as dg scaffolds and loads them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import AssetCheckKey, AssetKey, Definitions, ResourceDefinition, asset, build_resources
from dagster.components.core.component_tree import ComponentTreeException
from dagster.components.core.package_entry import discover_entry_point_package_objects
from dagster.components.testing import create_defs_folder_sandbox
from jsonschema import Draft202012Validator

from outbox_plugin.dagster import (
    HarvesterResource,
    OutboxComponent,
    OutboxResource,
    Topic,
    build_harvester_sensor,
    build_outbox_checks,
    build_outbox_definitions,
    build_topic_assets,
)
from outbox_plugin.errors import InvalidSetting
from outbox_plugin.settings import Settings
from tests.components import component_schema, loaded
from tests.documents import blocks

pytestmark = [  # Dagster's own calls.
    pytest.mark.filterwarnings("ignore:`parse_obj_as` is deprecated"),
    pytest.mark.filterwarnings("ignore:.* is currently in beta"),
]

DSN = "postgresql://app:secret@db/shop"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_DSN", DSN)
    monkeypatch.setenv("OUTBOX_BOOTSTRAP_SERVERS", "kafka:9092")


def causes(error: BaseException | None) -> Iterator[str]:
    """What a chain of exceptions says."""
    while error is not None:
        yield str(error)
        error = error.__cause__


def checks(definitions: Definitions) -> set[AssetCheckKey]:
    return set(definitions.resolve_asset_graph().asset_check_keys)


def test_dagster_finds_the_component_in_its_registry() -> None:
    found = {f"{key.namespace}.{key.name}" for key in discover_entry_point_package_objects()}
    assert "outbox_plugin.dagster.OutboxComponent" in found


def test_what_is_scaffolded_loads_as_it_is() -> None:
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            component_cls=OutboxComponent, scaffold_params={"topic": "orders", "emitted_by": "shop/orders"}
        )
        written = yaml.safe_load((path / "defs.yaml").read_text())
        assert written == {
            "type": "outbox_plugin.dagster.component.OutboxComponent",
            "attributes": {"topics": [{"name": "orders", "emitted_by": ["shop/orders"]}]},
        }
        with sandbox.load_component_and_build_defs(defs_path=path) as (_, definitions):
            assert AssetKey(["kafka", "orders"]) in definitions.resolve_asset_graph().get_all_asset_keys()


def test_the_lineage_reads_source_emitter_outbox_topic() -> None:
    definitions = loaded({"topics": [{"name": "orders", "emitted_by": ["orders"]}, {"name": "bills"}]})
    graph = definitions.resolve_asset_graph()
    topic, outbox = AssetKey(["kafka", "orders"]), AssetKey("outbox")
    assert graph.get(topic).parent_keys == {outbox}
    assert graph.get(outbox).parent_keys == {AssetKey("orders")}
    assert graph.get(AssetKey("harvester")).parent_keys == {outbox}


def test_emitters_and_the_harvester_get_checks() -> None:
    found = checks(loaded({"topics": [{"name": "orders", "emitted_by": ["orders"]}]}))
    assert {(key.asset_key.to_user_string(), key.name) for key in found} == {
        ("orders", "outbox_drained"),
        ("orders", "events_in_order"),
        ("orders", "events_exactly_once"),
        ("harvester", "healthy"),
        ("harvester", "no_dead_letters"),
    }


def test_each_attribute_has_its_effect() -> None:
    definitions = loaded(
        {
            "topics": [{"name": "orders", "emitted_by": ["orders"], "fresh_within_minutes": 5}],
            "dsn": "{{ env.OUTBOX_DSN }}",
            "bootstrap_servers": "brokers:9092",
            "table": "app.outbox",
            "group": "theirs",
            "kafka": {"security.protocol": "ssl", "linger.ms": 5, "enable.ssl.certificate.verification": True},
            "prefix": "shop_",
            "mode": "observe",
            "lease_seconds": 7,
            "interval_seconds": 3,
            "blocking": True,
            "lag_warn_seconds": 1,
            "lag_error_seconds": 2,
        }
    )
    resources = definitions.resources or {}
    harvester = resources["shop_harvester"]
    assert isinstance(harvester, HarvesterResource)
    assert (harvester.mode, harvester.lease_seconds) == ("observe", 7)
    settings = harvester.settings()
    assert (settings.table, settings.group, settings.bootstrap_servers) == ("app.outbox", "theirs", "brokers:9092")
    assert settings.dsn.get_secret_value() == DSN
    assert settings.kafka == {
        "security.protocol": "ssl",
        "linger.ms": "5",
        "enable.ssl.certificate.verification": "true",
    }
    assert definitions.resolve_sensor_def("shop_harvester_sensor").minimum_interval_seconds == 3
    graph = definitions.resolve_asset_graph()
    assert graph.get(AssetKey("shop_outbox")).metadata["dagster/table_name"] == "app.outbox"
    assert graph.get_check_spec(AssetCheckKey(AssetKey("orders"), "shop_outbox_drained")).blocking
    policy = graph.get(AssetKey(["kafka", "orders"])).freshness_policy
    assert policy is not None
    assert policy.fail_window.to_timedelta() == timedelta(minutes=5)  # type: ignore[attr-defined]


def test_a_spark_resource_of_the_project_reads_topics_for_the_checks() -> None:
    declared = loaded({"topics": [{"name": "orders", "emitted_by": ["orders"]}], "spark_resource_key": "spark"})
    spark = ResourceDefinition.mock_resource()
    definitions = Definitions.merge(declared, Definitions(resources={"spark": spark}))
    key = AssetCheckKey(AssetKey("orders"), "events_in_order")
    [reads_topics] = [each for each in definitions.asset_checks or [] if key in each.check_keys]
    assert "spark" in reads_topics.required_resource_keys
    Definitions.validate_loadable(definitions)


def test_an_asset_that_consumes_a_topic_gets_a_sensor_a_check_and_a_job() -> None:
    consumer = {"asset": "shop/totals", "max_records": 5, "max_wait_seconds": 0, "interval_seconds": 7}
    definitions = loaded({"topics": [{"name": "orders", "consumed_by": [consumer]}], "prefix": "mine_"})
    sensor = definitions.resolve_sensor_def("shop__totals_of_orders")
    assert (sensor.minimum_interval_seconds, sensor.required_resource_keys) == (7, {"mine_outbox"})
    assert AssetCheckKey(AssetKey(["shop", "totals"]), "consumed_in_full") in checks(definitions)
    assert "shop__totals_position" in {job.name for job in definitions.jobs or ()}


def test_the_component_of_the_page_loads() -> None:
    page = blocks("how-to/consume-in-dagster-and-spark.md", "yaml")
    [block] = [each.text for each in page if "attributes:" in each.text]
    definitions = loaded(yaml.safe_load(block)["attributes"])
    assert definitions.resolve_sensor_def("customer_totals_of_orders")


def test_the_jobs_that_give_orders_come_with_it() -> None:
    assert {job.name for job in loaded({"topics": [{"name": "orders"}]}).jobs or ()} == {
        "outbox_pause",
        "outbox_resume",
        "outbox_replay",
        "outbox_retry_dead_letters",
        "outbox_release_parked",
    }


def test_two_outboxes_fit_into_one_code_location() -> None:
    def outbox(group: str) -> HarvesterResource:
        return HarvesterResource(outbox=OutboxResource(dsn=DSN, bootstrap_servers="kafka:9092", group=group))

    @asset
    def orders() -> None: ...

    merged = Definitions.merge(
        Definitions(assets=[orders]),
        build_outbox_definitions(outbox("one"), [Topic("orders", [orders])]),
        build_outbox_definitions(outbox("two"), [Topic("bills", ["bills"])], prefix="second_"),
    )
    Definitions.validate_loadable(merged)
    assert {sensor.name for sensor in merged.sensors or ()} == {"harvester_sensor", "second_harvester_sensor"}


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"dsn": "nowhere at all"}, "OUTBOX_DSN: not a Postgres URI; expected postgresql://"),
        ({"table": "no such name"}, "OUTBOX_TABLE: expected a table name"),
        ({"kafka": {"acks": "0"}}, "OUTBOX_KAFKA: the property 'acks' cannot be set here"),
    ],
)
def test_a_wrong_attribute_is_said_when_the_code_location_loads(attributes: dict[str, Any], said: str) -> None:
    with pytest.raises(ComponentTreeException) as raised:
        loaded({"topics": [{"name": "orders"}], **attributes})
    assert said in "\n".join(causes(raised.value))


@pytest.mark.parametrize(
    ("topics", "said"),
    [
        (
            [{"name": "orders", "emitted_by": ["orders"]}, {"name": "orders", "emitted_by": ["bills"]}],
            "topics: expected each topic once, with all assets that emit to it (given twice: orders)",
        ),
        (
            [{"name": each, "consumed_by": [{"asset": "shop/totals"}]} for each in ("orders", "bills")],
            "consumed_by: an asset consumes one topic: declare an asset for each topic (given twice: shop/totals)",
        ),
    ],
)
def test_what_is_declared_twice_is_named(topics: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ComponentTreeException) as raised:
        loaded({"topics": topics})
    assert said in causes(raised.value)


@pytest.mark.parametrize("name", ["dsn", "bootstrap_servers", "table", "group"])
def test_a_template_without_a_value_does_not_stand_for_another_outbox(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that is not set: the second outbox must not be the first one, which the environment names."""
    monkeypatch.setenv(f"OUTBOX_{name.upper()}", DSN if name == "dsn" else "first")
    definitions = loaded({"topics": [{"name": "orders"}], "prefix": "second_", name: "{{ env.NOT_SET }}"})
    with (
        build_resources(dict(definitions.resources or {})) as resources,
        pytest.raises(InvalidSetting, match=f"the resource's {name} is empty"),
    ):
        resources.second_outbox.settings()


@pytest.mark.parametrize("name", ["dsn", "bootstrap_servers", "table", "group"])
def test_an_attribute_that_is_null_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_DSN", DSN)
    monkeypatch.setenv("OUTBOX_BOOTSTRAP_SERVERS", "kafka:9092")
    definitions = loaded({"topics": [{"name": "orders"}], name: None})
    with build_resources(dict(definitions.resources or {})) as resources:
        assert resources.outbox.settings() == Settings()


def test_a_wrong_variable_is_said_when_the_code_location_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster import EnvVar

    monkeypatch.setenv("OUTBOX_DSN", "nowhere at all")
    with pytest.raises(InvalidSetting, match="OUTBOX_DSN: not a Postgres URI"):
        OutboxResource(dsn=EnvVar("OUTBOX_DSN"), bootstrap_servers="kafka:9092")
    monkeypatch.delenv("OUTBOX_DSN")
    OutboxResource(dsn=EnvVar("OUTBOX_DSN"), bootstrap_servers="kafka:9092")  # Known only to the run: loads.


def test_the_component_is_listed_with_what_it_makes(tmp_path: Path) -> None:
    assert OutboxComponent.get_spec().produces == ["asset", "asset_check", "job", "sensor", "resource"]
    assert OutboxComponent.get_spec().description


def complaints(attributes: dict[str, Any]) -> list[str]:
    """What `dg check yaml` says of a component's attributes."""
    return [error.message for error in Draft202012Validator(component_schema()).iter_errors(attributes)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mode": "sometimes"}, "'sometimes' is not valid"),
        ({"lease_seconds": "soon"}, "'soon' is not valid"),
        ({"lease_seconds": float("inf")}, "inf is not valid"),
        ({"drain_seconds": 1e12}, "1000000000000.0 is not valid"),
        ({"topics": [{"name": "bad topic!"}]}, "'bad topic!' does not match"),
        ({"topics": [{"name": "orders", "emitted_by": "orders"}]}, "'orders' is not valid"),
        ({"topics": [{"name": "orders", "fresh_within_minutes": "five"}]}, "'five' is not valid"),
        ({"topics": "orders"}, "'orders' is not valid"),
    ],
)
def test_what_would_not_load_does_not_pass_as_yaml(wrong: dict[str, Any], said: str) -> None:
    [complaint] = complaints({"topics": [{"name": "orders"}], **wrong})
    assert said in complaint


def test_templates_and_right_values_pass_as_yaml() -> None:
    topic = {"name": "{{ env.TOPIC }}", "emitted_by": ["shop/orders"], "fresh_within_minutes": "{{ 5 }}"}
    right = {"topics": [topic], "mode": "{{ env.MODE }}", "lease_seconds": "{{ 60 }}", "table": "app.outbox"}
    assert complaints({**right, "kafka": {"linger.ms": 5}}) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mode": "sometimes"}, "sometimes"),
        ({"topics": [{"name": "bad topic!"}]}, "topic: expected 1 to 249 letters, digits, dots, _ and -"),
        ({"lease_seconds": 15}, "lease_seconds: expected 20 or more, with a sensor that ticks every 10 s"),
        ({"lease_seconds": float("inf")}, "lease_seconds"),
        ({"drain_seconds": 1e12}, "drain_seconds"),
    ],
)
def test_what_does_not_pass_does_not_load(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ComponentTreeException) as raised:
        loaded({"topics": [{"name": "orders"}], **wrong})
    assert said in "\n".join(causes(raised.value))


def test_one_asset_is_no_list_of_assets() -> None:
    """A text is a sequence of its letters, and a key one of its parts: each would be taken for an asset."""

    @asset
    def orders() -> None: ...

    for one in ("orders", AssetKey(["shop", "orders"]), orders):
        with pytest.raises(InvalidSetting, match="emitted_by: expected a list of assets"):
            Topic("orders", emitted_by=one)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="topics: expected a list of topics' names"):
        build_outbox_checks(AssetKey("orders"), topics="orders")
    with pytest.raises(InvalidSetting, match="topics: expected a list of topics' names"):
        build_harvester_sensor(AssetKey("harvester"), topics="orders")
    assert build_topic_assets([Topic("orders", emitted_by=["orders"])])[0].deps
