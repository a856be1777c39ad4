"""The component: an outbox declared in YAML, `dg scaffold defs outbox_plugin.dagster.OutboxComponent outbox`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal

from dagster import (
    AssetSpec,
    Component,
    ComponentLoadContext,
    Definitions,
    EnvVar,
    Model,
    ResolutionContext,
    Resolvable,
    Resolver,
    Scaffolder,
    ScaffoldRequest,
)
from dagster.components import ComponentTypeSpec, ResolvedAssetKey, scaffold_component, scaffold_with
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from outbox_plugin.dagster.daemon_supervision import LONGEST_SECONDS
from outbox_plugin.dagster.definitions import build_outbox_definitions
from outbox_plugin.dagster.resources import HarvesterResource, OutboxResource
from outbox_plugin.dagster.topic import Topic
from outbox_plugin.dagster.topic_position import build_position_job, build_topic_check
from outbox_plugin.dagster.topic_sensor import STUCK_SECONDS, build_topic_sensor
from outbox_plugin.dagster.translator import DagsterOutboxTranslator, OutboxAssetProps
from outbox_plugin.emit.event import TOPIC_PATTERN
from outbox_plugin.errors import InvalidSetting
from outbox_plugin.status.health_rules import Limits

_TEMPLATE = r"\{\{.*\}\}"


class Attributes(Model, Resolvable):
    """Attributes whose JSON schema, which `dg` and editors read, has our descriptions, and accepts no wrong text.

    Dagster's own schema loses the descriptions of fields that have a default. It accepts any text for every type,
    because it may be a template; a wrong value would pass `dg check yaml`.
    """

    @classmethod
    def model(cls) -> type[BaseModel]:
        """The model that Dagster derives."""
        derived = super().model()
        before = derived.model_config.get("json_schema_extra")
        if not callable(before):  # Otherwise the schema has been completed before.
            derived.model_config["json_schema_extra"] = _mended(before or {}, cls.model_fields)
        return derived


def _mended(before: dict[str, Any], fields: Mapping[str, FieldInfo]) -> Callable[[dict[str, Any]], None]:
    """A function that completes a schema: with `before`, which is Dagster's, and with our descriptions.

    In place of a value of another type, the schema then accepts only a template, and no other text.
    """

    def add(schema: dict[str, Any]) -> None:
        schema.update(before)
        for name, attribute in schema["properties"].items():
            described = {"description": fields[name].description, "examples": fields[name].examples}
            attribute |= {key: value for key, value in described.items() if value}
            kinds = attribute.get("anyOf", [])
            if any(kind.get("type") not in ("string", "null") or "enum" in kind for kind in kinds):
                kinds = [{**kind, "pattern": _TEMPLATE} if kind == _TEXT else kind for kind in kinds]
                attribute["anyOf"] = kinds
            for kind in kinds:
                if kind.get("type") == "array":  # So that an error names the wrong item of a list.
                    attribute |= {"if": {"type": "array"}, "then": kind, "else": {"anyOf": attribute.pop("anyOf")}}

    return add


def _given(context: ResolutionContext, value: str | None) -> str | None:
    """An attribute that names an outbox, as the resource takes it: None if it was left out, or is YAML's null.

    It is an empty text where a template has no value, as that of a variable that is not set. The resource refuses that
    when it is used: it must not fall back on $OUTBOX_DSN, which may name another outbox.
    """
    if value is None:
        return None
    resolved = context.resolve_value(value)
    return "" if resolved is None else str(resolved)


_TEXT = {"type": "string"}
_Name = Annotated[str | None, Resolver(_given, model_field_type=str | None, inject_before_resolve=False)]
_TRANSLATION = TranslationFnResolver[OutboxAssetProps](lambda props: {"props": props})


class ConsumerModel(Attributes):
    """An asset that consumes a topic, range by range."""

    asset: ResolvedAssetKey = Field(description="The asset. It takes a RangeConfig, and gets a check and a job.")
    max_records: int = Field(default=100_000, ge=1, description="The most offsets in one range.")
    max_wait_seconds: float = Field(
        default=60.0,
        ge=0,
        description="Seconds that the first record of a smaller range waits before a run is requested.",
    )
    interval_seconds: int = Field(default=30, ge=1, description="Seconds between two ticks of its sensor.")
    stuck_after_seconds: float = Field(
        default=STUCK_SECONDS,
        gt=0,
        description="Seconds after which a run that has not ended fails the check, while records wait.",
    )


class TopicModel(Attributes):
    """A topic that events are published to."""

    name: Annotated[str, Resolver.default(json_schema_extra={"pattern": f"{TOPIC_PATTERN}|{_TEMPLATE}"})] = Field(
        description="The topic's name in Kafka."
    )
    emitted_by: Sequence[ResolvedAssetKey] = Field(
        default=(),
        description="The assets that emit to the topic when they are materialized. Each gets checks.",
        examples=[["shop/orders"]],
    )
    fresh_within_minutes: int | None = Field(
        default=None, ge=1, description="Minutes without a new record after which Dagster calls the topic stale."
    )
    outboxes: Sequence[ResolvedAssetKey] = Field(
        default=(),
        description="For a topic of several outboxes: the keys of all their tables, the same list in each component. "
        "The first one defines the topic's asset.",
        examples=[["outbox", "second_outbox"]],
    )
    consumed_by: Sequence[ConsumerModel] = Field(
        default=(),
        description="The assets that consume the topic. Each gets a position of its own and a sensor.",
        examples=[[{"asset": "customer_totals", "max_records": 50_000}]],
    )


class OutboxScaffoldParams(BaseModel):
    """The parameters of `dg scaffold`."""

    topic: str = Field(default="events", description="A topic that events are published to.")
    emitted_by: str | None = Field(default=None, description="The asset that emits to it.")


class OutboxScaffolder(Scaffolder[OutboxScaffoldParams]):
    """Writes a declaration that loads as it is, and shows where an outbox is named."""

    @classmethod
    def get_scaffold_params(cls) -> type[OutboxScaffoldParams]:
        """The parameters' model."""
        return OutboxScaffoldParams

    def scaffold(self, request: ScaffoldRequest[OutboxScaffoldParams]) -> None:
        """Write the declaration."""
        topic: dict[str, Any] = {"name": request.params.topic}
        if request.params.emitted_by:
            topic["emitted_by"] = [request.params.emitted_by]
        scaffold_component(request, {"topics": [topic]})


@scaffold_with(OutboxScaffolder)
class OutboxComponent(Component, Attributes):
    """A transactional outbox: its table, topics and harvester as assets, with a sensor, checks and jobs.

    The sensor keeps the harvester running. Where the attributes do not name the database and the brokers,
    `OUTBOX_DSN` and `OUTBOX_BOOTSTRAP_SERVERS` do.
    """

    topics: Sequence[TopicModel] = Field(
        description="The topics that events are published to.",
        examples=[[{"name": "orders", "emitted_by": ["orders"]}]],
    )
    dsn: _Name = Field(
        default=None,
        description="Postgres URI. A secret; by default $OUTBOX_DSN.",
        examples=["{{ env.OUTBOX_DSN }}"],
        repr=False,
    )
    bootstrap_servers: _Name = Field(
        default=None,
        description="Kafka brokers, host:port, comma separated; by default $OUTBOX_BOOTSTRAP_SERVERS.",
        examples=["kafka-1:9092,kafka-2:9092"],
    )
    table: _Name = Field(
        default=None, description="The outbox table, optionally with its schema.", examples=["app.outbox"]
    )
    group: _Name = Field(default=None, description="The name that all harvesters of this outbox share.")
    kafka: dict[str, str | int | float | bool] = Field(
        default={},
        description="librdkafka properties: TLS, SASL, tuning.",
        examples=[{"security.protocol": "ssl"}],
        repr=False,
    )
    prefix: str = Field(
        default="",
        description="Comes before each name; set it for a second outbox in one Dagster deployment.",
        examples=["second_"],
    )
    mode: Literal["supervise", "observe"] = Field(
        default="supervise",
        description="supervise: keep a daemon running here; observe: report on one that runs elsewhere.",
    )
    lease_seconds: float = Field(
        default=60.0, gt=0, le=LONGEST_SECONDS, description="Seconds without a tick after which the daemon ends."
    )
    interval_seconds: int = Field(default=10, ge=1, description="Seconds between two ticks of the sensor.")
    drain_seconds: float = Field(
        default=120.0, gt=0, le=LONGEST_SECONDS, description="Seconds that the check outbox_drained waits."
    )
    blocking: bool = Field(default=False, description="Whether downstream assets wait for outbox_drained.")
    lag_warn_seconds: float = Field(
        default=30.0, gt=0, description="Seconds of lag from which the check healthy warns; at most lag_error_seconds."
    )
    lag_error_seconds: float = Field(
        default=300.0, gt=0, description="Seconds of lag or trouble from which it is an error."
    )
    spark_resource_key: str | None = Field(
        default=None,
        description="The key of a SparkResource, which reads large topics for the checks. Without it, they read "
        "at most 5,000,000 records.",
        examples=["spark"],
    )
    translation: Annotated[TranslationFn[OutboxAssetProps], _TRANSLATION] | None = Field(
        default=None,
        description="Attributes of the assets of the table, the topics and the harvester, such as key_prefix, "
        "group_name, owners, tags, kinds and metadata. Templates can use props (type, name, topic) and spec.",
        examples=[{"key_prefix": "shop", "owners": ["team:orders"], "tags": {"part": "{{ props.type }}"}}],
    )

    @classmethod
    def get_spec(cls) -> ComponentTypeSpec:
        """What Dagster lists of it."""
        return ComponentTypeSpec(
            description="A transactional outbox for Postgres and Kafka.",
            tags=["kafka", "postgres", "outbox"],
            produces=["asset", "asset_check", "job", "sensor", "resource"],
        )

    def get_asset_spec(self, props: OutboxAssetProps) -> AssetSpec:
        """The spec of an asset; override it in a subclass. The attribute `translation` is applied to the result."""
        return DagsterOutboxTranslator().get_asset_spec(props)

    def build_defs(self, context: ComponentLoadContext) -> Definitions:  # noqa: ARG002 - Dagster's signature.
        """The outbox's definitions."""
        outbox = OutboxResource(
            dsn=EnvVar("OUTBOX_DSN") if self.dsn is None else self.dsn,
            bootstrap_servers=(
                EnvVar("OUTBOX_BOOTSTRAP_SERVERS") if self.bootstrap_servers is None else self.bootstrap_servers
            ),
            table=self.table,
            group=self.group,
            kafka={name: _text(value) for name, value in self.kafka.items()},
        )
        declared = build_outbox_definitions(
            HarvesterResource(outbox=outbox, mode=self.mode, lease_seconds=self.lease_seconds),
            [_topic(topic) for topic in self.topics],
            prefix=self.prefix,
            interval_seconds=self.interval_seconds,
            spark_resource_key=self.spark_resource_key,
            drain_within=timedelta(seconds=self.drain_seconds),
            blocking=self.blocking,
            limits=Limits(lag_warn_seconds=self.lag_warn_seconds, lag_error_seconds=self.lag_error_seconds),
            translator=_ComponentTranslator(self),
        )
        consumed = [(topic.name, consumer) for topic in self.topics for consumer in topic.consumed_by]
        keys = [consumer.asset for _, consumer in consumed]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise InvalidSetting(
                "consumed_by: an asset consumes one topic: declare an asset for each topic "
                f"(given twice: {twice.to_user_string()})"
            )
        consumers = [_consumer(topic, consumer, f"{self.prefix}outbox") for topic, consumer in consumed]
        return Definitions.merge(declared, *consumers)


class _ComponentTranslator(DagsterOutboxTranslator):
    """Translates as a component says: by its method, and then by its attribute."""

    def __init__(self, component: OutboxComponent) -> None:
        self._component = component

    def get_asset_spec(self, props: OutboxAssetProps) -> AssetSpec:
        """The asset's spec."""
        spec = self._component.get_asset_spec(props)
        return self._component.translation(spec, props) if self._component.translation else spec


def _consumer(topic: str, model: ConsumerModel, resource_key: str) -> Definitions:
    sensor = build_topic_sensor(
        topic,
        model.asset,
        resource_key=resource_key,
        interval_seconds=model.interval_seconds,
        max_records=model.max_records,
        max_wait_seconds=model.max_wait_seconds,
        stuck_after_seconds=model.stuck_after_seconds,
    )
    return Definitions(
        sensors=[sensor],
        asset_checks=[
            build_topic_check(
                topic, model.asset, resource_key=resource_key, stuck_after_seconds=model.stuck_after_seconds
            )
        ],
        jobs=[build_position_job(topic, model.asset, resource_key=resource_key)],
    )


def _topic(model: TopicModel) -> Topic:
    minutes = model.fresh_within_minutes
    return Topic(model.name, model.emitted_by, timedelta(minutes=minutes) if minutes else None, model.outboxes)


def _text(value: str | float | bool) -> str:
    """A property as librdkafka takes it; YAML's true, and templates that look like numbers, come as other types."""
    return str(value).lower() if isinstance(value, bool) else str(value)
