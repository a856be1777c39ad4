"""What decides the assets of an outbox: the translator, `translation` in YAML, and outboxes that share topics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dagster import AssetKey, AssetSpec, DagsterInstance, Definitions, EnvVar, build_sensor_context
from dagster.components.testing.test_cases import TestTranslation as DagstersCases

from outbox_plugin.dagster import (
    DagsterOutboxTranslator,
    HarvesterResource,
    OutboxAssetProps,
    OutboxComponent,
    OutboxResource,
    Topic,
    build_harvester_asset,
    build_outbox_definitions,
    build_topic_assets,
)
from outbox_plugin.dagster.component import _ComponentTranslator
from outbox_plugin.errors import InvalidSetting
from tests.components import loaded

pytestmark = [  # Dagster's own calls.
    pytest.mark.filterwarnings("ignore:`parse_obj_as` is deprecated"),
    pytest.mark.filterwarnings("ignore:.* is currently in beta"),
    pytest.mark.filterwarnings("ignore:Accessing `{{automation_condition"),  # Of Dagster's cases.
]

Reported = Callable[[Definitions, str], set[AssetKey]]
OUTBOX, TOPIC, HARVESTER = AssetKey("outbox"), AssetKey(["kafka", "orders"]), AssetKey("harvester")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_DSN", "postgresql://app@db/shop")
    monkeypatch.setenv("OUTBOX_BOOTSTRAP_SERVERS", "kafka:9092")


class Shop(DagsterOutboxTranslator):
    """Puts all under `shop`, and gives topics an owner."""

    def get_asset_spec(self, props: OutboxAssetProps) -> AssetSpec:
        spec = super().get_asset_spec(props)
        owners = ["team:streams"] if props.type == "topic" else None
        return spec.replace_attributes(key=spec.key.with_prefix("shop"), group_name="shop").merge_attributes(
            owners=owners or []
        )


def harvester(group: str = "outbox") -> HarvesterResource:
    outbox = OutboxResource(dsn="postgresql://app@127.0.0.1:1/shop", bootstrap_servers="127.0.0.1:1", group=group)
    return HarvesterResource(outbox=outbox, mode="observe")


def specs(definitions: Definitions) -> dict[AssetKey, AssetSpec]:
    Definitions.validate_loadable(definitions)
    return {spec.key: spec for spec in definitions.resolve_all_asset_specs()}


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Reported:
    """The keys of the topics on which a sensor reports; Kafka is asked by nobody, and Postgres is away."""
    monkeypatch.setattr("outbox_plugin.dagster.sensor.STATUS_SECONDS", 0.1)
    monkeypatch.setattr("outbox_plugin.dagster.sensor.topic_ends", lambda _, topics, __: dict.fromkeys(topics, 0))

    def tick(definitions: Definitions, name: str) -> set[AssetKey]:
        sensor = definitions.resolve_sensor_def(name)
        needed = {key: (definitions.resources or {})[key] for key in sensor.required_resource_keys}
        with DagsterInstance.ephemeral() as instance, build_sensor_context(instance, resources=needed) as context:
            events = sensor.evaluate_tick(context).asset_events
        return {event.asset_key for event in events[3:]}  # The first three are the harvester's.

    return tick


def test_a_translator_decides_keys_and_the_rest_follows(reported: Reported) -> None:
    definitions = build_outbox_definitions(harvester(), [Topic("orders", ["orders"])], translator=Shop())
    found = specs(definitions)
    outbox, topic, relay = (key.with_prefix("shop") for key in (OUTBOX, TOPIC, HARVESTER))
    assert found.keys() == {outbox, topic, relay, AssetKey("orders")}
    assert [dep.asset_key for dep in found[topic].deps] == [outbox]
    assert [dep.asset_key for dep in found[relay].deps] == [outbox]
    assert [dep.asset_key for dep in found[outbox].deps] == [AssetKey("orders")]
    assert {found[key].group_name for key in (outbox, topic, relay)} == {"shop"}
    assert (found[topic].owners, found[outbox].owners) == (["team:streams"], [])
    assert {key.asset_key for key in definitions.resolve_asset_graph().asset_check_keys} == {relay, AssetKey("orders")}
    assert reported(definitions, "harvester_sensor") == {topic}


def test_each_part_alone_is_translated() -> None:
    outbox, topic = build_topic_assets([Topic("orders")], translator=Shop())
    relay = build_harvester_asset("relay", outbox=outbox.key, translator=Shop())
    assert [spec.key.to_user_string() for spec in (outbox, topic, relay)] == [
        "shop/outbox",
        "shop/kafka/orders",
        "shop/relay",
    ]
    assert [dep.asset_key for dep in relay.deps] == [outbox.key]


class TestComponent(DagstersCases):
    """Dagster's own cases for the attribute `translation` of a component."""

    def test_translation(
        self,
        attributes: dict[str, Any],
        assertion: Callable[[AssetSpec], bool],
        key_modifier: Callable[[AssetKey], AssetKey] | None,
    ) -> None:
        found = specs(loaded({"topics": [{"name": "orders"}], "translation": attributes}))
        for key in (OUTBOX, TOPIC, HARVESTER):
            assert assertion(found[key_modifier(key) if key_modifier else key])


def test_the_templates_of_a_translation_see_the_asset() -> None:
    asset = "{{ props.type }} {{ props.name }} {{ props.topic.name if props.topic else '' }} {{ spec.group_name }}"
    found = specs(loaded({"topics": [{"name": "orders"}], "translation": {"metadata": {"seen": asset}}}))
    seen = {key: str(found[key].metadata["seen"]).split() for key in (OUTBOX, TOPIC, HARVESTER)}
    assert seen == {
        OUTBOX: ["outbox", "outbox", "outbox"],
        TOPIC: ["topic", "orders", "orders", "outbox"],
        HARVESTER: ["harvester", "harvester", "outbox"],
    }


def test_a_subclass_of_the_component_translates_before_the_attribute_does() -> None:
    class Ours(OutboxComponent):
        def get_asset_spec(self, props: OutboxAssetProps) -> AssetSpec:
            return super().get_asset_spec(props).replace_attributes(owners=["team:a"], group_name="ours")

    component = Ours(topics=[], translation=lambda spec, _: spec.replace_attributes(owners=["team:b"]))
    spec = _ComponentTranslator(component).get_asset_spec(OutboxAssetProps("outbox", "outbox", OUTBOX))
    assert (spec.owners, spec.group_name) == (["team:b"], "ours")


def test_two_outboxes_share_a_topic_that_one_defines(reported: Reported) -> None:
    """The topic is downstream of both tables; one sensor reports on it; an asset that emits to both has all checks."""
    tables = ["outbox", "second_outbox"]
    merged = Definitions.merge(
        build_outbox_definitions(harvester("one"), [Topic("orders", ["orders"], outboxes=tables)]),
        build_outbox_definitions(
            harvester("two"), [Topic("orders", ["orders"], outboxes=tables), Topic("bills")], prefix="second_"
        ),
    )
    found = specs(merged)
    assert {dep.asset_key for dep in found[TOPIC].deps} == {OUTBOX, AssetKey("second_outbox")}
    assert reported(merged, "harvester_sensor") == {TOPIC}
    assert reported(merged, "second_harvester_sensor") == {AssetKey(["kafka", "bills"])}
    names = {key.name for key in merged.resolve_asset_graph().get_check_keys_for_assets({AssetKey("orders")})}
    checks = {"outbox_drained", "events_in_order", "events_exactly_once"}
    assert names == checks | {f"second_{name}" for name in checks}


def test_two_components_share_a_topic() -> None:
    topic = {"name": "orders", "emitted_by": ["orders"], "outboxes": ["shop/outbox", "shop/second_outbox"]}
    translation = {"key_prefix": "shop"}
    found = specs(
        loaded(
            {"topics": [topic], "translation": translation},
            {"topics": [topic], "translation": translation, "prefix": "second_", "group": "second"},
        )
    )
    assert {dep.asset_key.to_user_string() for dep in found[TOPIC.with_prefix("shop")].deps} == set(topic["outboxes"])


def test_a_list_of_outboxes_without_the_own_one_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"orders: outboxes: expected outbox among them \(given: other\)"):
        build_topic_assets([Topic("orders", outboxes=["other"])])
    with pytest.raises(InvalidSetting, match="outboxes: expected a list of assets"):
        Topic("orders", outboxes="outbox")


def test_the_table_has_its_name_as_dagster_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(table: str | None) -> object:
        outbox = harvester().outbox.model_copy(update={"table": table})
        definitions = build_outbox_definitions(HarvesterResource(outbox=outbox), [])
        return specs(definitions)[OUTBOX].metadata.get("dagster/table_name")

    assert shown("app.outbox") == "app.outbox"
    assert shown(None) == "outbox"
    assert shown(EnvVar("OF_THE_RUN")) is None
    monkeypatch.setenv("OUTBOX_TABLE", "theirs.outbox")
    assert shown(None) == "theirs.outbox"
