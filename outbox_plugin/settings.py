"""Every option of the outbox: its name, its default, its allowed values.

Values come from keyword arguments, then the environment (`OUTBOX_…`), then a `.env` file in the working directory.
"""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from outbox_plugin.core.delivery_options import BadRows, Delivery
from outbox_plugin.errors import InvalidSetting

LogFormat = Literal["text", "json"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]

# The promises rest on these properties, so OUTBOX_KAFKA must not change them.
LOAD_BEARING_PROPERTIES = {
    "acks": "OUTBOX_DELIVERY",
    "bootstrap.servers": "OUTBOX_BOOTSTRAP_SERVERS",
    "enable.auto.commit": "the election",
    "enable.idempotence": "order per key",
    "group.id": "OUTBOX_GROUP",
    "isolation.level": "recovery after a crash",
    "max.in.flight": "order per key",
    "max.in.flight.requests.per.connection": "order per key",
    "metadata.broker.list": "OUTBOX_BOOTSTRAP_SERVERS",
    "partitioner": "keys must land where Java clients put them",
    "request.required.acks": "OUTBOX_DELIVERY",
    "retry.backoff.max.ms": "exactly-once delivery, which derives from it whether a request was repeated",
    "retry.backoff.ms": "exactly-once delivery, which derives from it whether a request was repeated",
    "transactional.id": "OUTBOX_GROUP",
}
_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_$]{0,62}"
_TABLE = re.compile(rf"(?:{_IDENTIFIER}\.)?{_IDENTIFIER}")
_TABLE_OF_SCHEMAS = re.compile(rf"[A-Za-z0-9_$*]{{1,63}}\.{_IDENTIFIER}")
_NAME = r"[^\W\d]\w*"  # Of a module or a function in Python.
_GROUP = re.compile(r"[A-Za-z0-9._-]{1,200}")
_FUNCTION = re.compile(rf"{_NAME}(?:\.{_NAME})*:{_NAME}(?:\.{_NAME})*")
# As librdkafka takes it: PROTOCOL://host:port, where only the host is needed. An IPv6 address before a port is in
# brackets.
_BROKER = re.compile(
    r"(?:[A-Za-z_]+://)?(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+|(?=(?:[^:]*:){2})[0-9A-Fa-f:.]+\Z)(?::(?P<port>\d+))?(?:/.*)?"
)
_DAYS = re.compile(r"([1-9]\d{0,4})d")
_ADDRESS = re.compile(r"(?:(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):)?(?P<port>[0-9]{1,5})")
_NOT_TAKEN = re.compile("[\0\ud800-\udfff]")  # librdkafka cuts a text at NUL, and UTF-8 has no lone surrogates.
LOCALHOST = "127.0.0.1"
MAX_SHARDS = 1_024
# `kafka_token_provider` is the name of a function, but somebody may put a token there by mistake.
_SECRETS = {"dsn", "kafka", "kafka_token_provider", "outboxes"}


class LogSettings(BaseSettings):
    """How this package's own processes write their logs: `outbox …`, and the harvester that Dagster's daemon runs.

    Raises:
        InvalidSetting: a setting is wrong. The message is one line: the setting, its value and the allowed values.
    """

    model_config = SettingsConfigDict(env_prefix="OUTBOX_", env_file=".env", extra="ignore", frozen=True)

    log_format: Annotated[LogFormat, Field(description="The form of a log's line.")] = "text"
    log_level: Annotated[
        LogLevel | None,
        Field(description="The least severe events that are logged. By default INFO in a harvester, else WARNING."),
    ] = None

    @field_validator("log_level", mode="before")
    @classmethod
    def _log_level_in_any_case(cls, level: Any) -> Any:
        in_capitals = str(level).upper()
        return in_capitals if in_capitals in get_args(LogLevel) else level

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InvalidSetting(_one_line(error)) from None
        except UnicodeDecodeError:
            raise InvalidSetting(f"{self.model_config['env_file']}: expected a file in UTF-8") from None
        except OSError as error:
            raise InvalidSetting(f"{self.model_config['env_file']}: cannot be read: {error.strerror}") from None
        except ValueError as error:  # pydantic-settings raises it if a variable that must be JSON is not.
            field = re.search(r'field "(\w+)"', str(error))
            said = f"OUTBOX_{field[1].upper()}: expected JSON" if field else str(error).replace("\n", " ")
            raise InvalidSetting(said) from None
        except RecursionError:
            raise InvalidSetting(
                "OUTBOX_KAFKA or OUTBOX_OUTBOXES: expected JSON (given: lists or objects, nested too deep)"
            ) from None


def _is_broker(address: str) -> bool:
    """Whether librdkafka can connect to it: a host, perhaps with a protocol before it, and a port after it."""
    found = _BROKER.fullmatch(address)
    return found is not None and (found["port"] is None or 0 < int(found["port"]) < 65_536)


class Settings(LogSettings):
    """The outbox's settings, checked when made.

    Example: `Settings(dsn="postgresql://app@db/shop", bootstrap_servers="kafka:9092")`.

    Raises:
        InvalidSetting: a setting is wrong. The message is one line: the setting, its value and the allowed values. It
            shows no secrets.
    """

    dsn: Annotated[SecretStr, Field(description="Postgres URI of the database that holds the outbox.")]
    bootstrap_servers: Annotated[str, Field(description="Kafka brokers, host:port, comma separated.")]
    table: Annotated[
        str,
        Field(description="The outbox table, optionally with its schema, in which * stands for any characters."),
    ] = "outbox"
    group: Annotated[
        str, Field(description="Harvesters of one outbox share it; leader topic and transactional ids derive from it.")
    ] = "outbox"
    delivery: Annotated[Delivery, Field(description="What a consumer sees across crashes.")] = "exactly-once"
    shards: Annotated[int, Field(ge=1, le=MAX_SHARDS, description="Leaders that the outbox's keys are split over.")] = 1
    bad_rows: Annotated[
        BadRows, Field(description="What happens to a row that Kafka refuses: its key waits, or it is dead-lettered.")
    ] = "park"
    retention: Annotated[
        timedelta | None, Field(description="How long published rows are kept, as `7d`. By default they are deleted.")
    ] = None
    leader_topic: Annotated[
        str | None, Field(description="The election's topic, if not <group>-leader: to share goharvest's.")
    ] = None
    leader_group: Annotated[
        str | None,
        Field(description="The election's consumer group, if not <group>-leader: to share goharvest's."),
    ] = None
    outboxes: Annotated[
        list[dict[str, Any]],
        Field(repr=False, description="Several outboxes for one harvester: for each, the settings that differ."),
    ] = []
    tenants_rest: Annotated[
        float | None,
        Field(
            ge=1.0,
            allow_inf_nan=False,
            description="With * in the table: seconds without events after which an outbox has no harvester until it "
            "has events again. By default each always has one.",
        ),
    ] = None
    kafka: Annotated[
        dict[str, str], Field(repr=False, description="librdkafka properties laid over ours: TLS, SASL, tuning.")
    ] = {}
    kafka_token_provider: Annotated[
        str | None,
        Field(description="package.module:function that returns a token for SASL OAUTHBEARER, and when it expires."),
    ] = None
    listen: Annotated[
        str | None,
        Field(description="PORT or HOST:PORT that serves /metrics, /readyz and /livez; without a host, 127.0.0.1."),
    ] = None
    spark_packages: Annotated[
        str, Field(description="Maven coordinates of Spark's Kafka source; the default version is Spark's own.")
    ] = "org.apache.spark:spark-sql-kafka-0-10_2.13"

    def __init__(self, **values: Any) -> None:  # So that type checkers accept values that are converted, such as "7d".
        super().__init__(**values)

    @field_validator("dsn")
    @classmethod
    def _dsn_is_a_conninfo(cls, dsn: SecretStr) -> SecretStr:
        from psycopg import ProgrammingError  # Imported here, so that consumers without Postgres need no driver.
        from psycopg.conninfo import conninfo_to_dict

        if cls.model_fields["dsn"].is_required() and not dsn.get_secret_value().strip():
            raise ValueError("it is empty; expected postgresql://user:password@host:port/database")
        try:
            given = conninfo_to_dict(dsn.get_secret_value())
        except ProgrammingError:
            raise ValueError("not a Postgres URI; expected postgresql://user:password@host:port/database") from None
        if _has_stray_at(dsn.get_secret_value()):
            raise ValueError("an @ or a / in the user or the password must be written as %40 or %2F")
        if not all(not port or port.isdecimal() for port in str(given.get("port") or "").split(",")):
            raise ValueError("the port is no number; a : or a / in the user or the password must be %3A or %2F")
        return dsn

    @field_validator("bootstrap_servers")
    @classmethod
    def _brokers_are_addresses(cls, brokers: str) -> str:
        addresses = [each for each in map(str.strip, brokers.split(",")) if each]
        if not addresses or not all(map(_is_broker, addresses)):
            raise ValueError("expected brokers as host:port, with commas between them")
        return brokers

    @field_validator("table")
    @classmethod
    def _table_is_a_name(cls, table: str) -> str:
        if not _TABLE.fullmatch(table) and not _TABLE_OF_SCHEMAS.fullmatch(table):
            raise ValueError(
                "expected a table name, or schema.table, of letters, digits, _ and $; the schema may have *, which "
                "stands for any characters"
            )
        if "." in table and table.startswith(("pg_", "information_schema.")):
            raise ValueError(
                "expected another schema: information_schema, and those that begin with pg_, are Postgres's own"
            )
        return table

    @field_validator("group", "leader_topic", "leader_group")
    @classmethod
    def _group_is_a_topic_prefix(cls, group: str | None) -> str | None:
        if group is not None and not _GROUP.fullmatch(group):
            raise ValueError("expected 1 to 200 letters, digits, dots, dashes and underscores (it names Kafka topics)")
        return group

    @field_validator("retention", mode="before")
    @classmethod
    def _retention_is_days(cls, retention: Any) -> Any:
        if retention is None or isinstance(retention, timedelta):
            return retention
        days = _DAYS.fullmatch(str(retention))
        if not days:
            raise ValueError("expected whole days, as in 7d")
        return timedelta(days=int(days[1]))

    @field_validator("listen", mode="before")
    @classmethod
    def _listen_is_text(cls, listen: Any) -> Any:
        return str(listen) if type(listen) is int else listen

    @field_validator("listen")
    @classmethod
    def _listen_is_an_address(cls, listen: str | None) -> str | None:
        if listen is not None:
            host_and_port(listen)
        return listen

    @field_validator("kafka_token_provider")
    @classmethod
    def _token_provider_is_a_function(cls, provider: str | None) -> str | None:
        if provider is not None and not _FUNCTION.fullmatch(provider):
            raise ValueError("expected a function of a module, as in shop.tokens:kafka_token")
        return provider

    @model_validator(mode="after")
    def _tokens_have_one_source(self) -> Self:
        """OAUTHBEARER needs tokens of one source. librdkafka says nothing where there is none, and never connects."""
        kafka = {name: value.strip().lower() for name, value in self.kafka.items()}
        by_oidc = kafka.get("sasl.oauthbearer.method") == "oidc"
        if _mechanism(kafka) != "oauthbearer" or not kafka.get("security.protocol", "").startswith("sasl_"):
            if self.kafka_token_provider is not None:
                raise ValueError(
                    "OUTBOX_KAFKA_TOKEN_PROVIDER: tokens are for OUTBOX_KAFKA with security.protocol=SASL_SSL and "
                    "sasl.mechanism=OAUTHBEARER"
                )
        elif self.kafka_token_provider is not None and by_oidc:
            raise ValueError(
                "OUTBOX_KAFKA_TOKEN_PROVIDER: OUTBOX_KAFKA has sasl.oauthbearer.method=oidc, another source of tokens"
            )
        elif self.kafka_token_provider is None and not by_oidc and not _makes_tokens_itself(kafka):
            raise ValueError(
                "OUTBOX_KAFKA: sasl.mechanism=OAUTHBEARER needs tokens: by sasl.oauthbearer.method=oidc, or by "
                "OUTBOX_KAFKA_TOKEN_PROVIDER"
            )
        return self

    @model_validator(mode="after")
    def _schemas_have_elections_of_their_own(self) -> Self:
        for name in ("leader_topic", "leader_group"):
            if self.names_many and getattr(self, name) is not None:
                raise ValueError(
                    f"OUTBOX_{name.upper()}: one name cannot serve all outboxes that OUTBOX_TABLE matches (given: "
                    f"{self.table!r})"
                )
        return self

    @model_validator(mode="after")
    def _outboxes_differ(self) -> Self:
        if self.outboxes:
            groups = [each.group for each in self.each()]
            if len(set(groups)) < len(groups):
                raise ValueError(f"OUTBOX_OUTBOXES: each outbox needs a group of its own (given: {', '.join(groups)})")
        return self

    @property
    def names_many(self) -> bool:
        """Whether `table` stands for the outboxes of all schemas that match it."""
        return "*" in self.table

    def of_schema(self, schema: str) -> Settings:
        """The settings of the outbox in one of the schemas that `table` matches; its group is `group_of_schema`.

        Raises:
            InvalidSetting: see `refusal_of_schema`.
        """
        if reason := self.refusal_of_schema(schema):
            raise InvalidSetting(reason)
        return self.model_copy(update={"table": self.table_of_schema(schema), "group": self.group_of_schema(schema)})

    def table_of_schema(self, schema: str) -> str:
        """The name of the outbox in one of the schemas that `table` matches."""
        return f"{schema}.{self.table.partition('.')[2]}"

    def group_of_schema(self, schema: str) -> str:
        """The group of the outbox in one of the schemas that `table` matches: `<group>-<schema>`.

        Kafka takes no dollar sign in the names of topics, so the group has a dot for each.
        """
        return f"{self.group}-{schema.replace('$', '.')}"

    def refusal_of_schema(self, schema: str) -> str | None:
        """Why the outbox in a schema cannot have a group named after the schema; None if it can.

        It can be asked for thousands of schemas, because it makes no settings.
        """
        if not _TABLE.fullmatch(self.table_of_schema(schema)):
            return f"expected a schema's name of letters, digits, _ and $ that begins with no digit (given: {schema!r})"
        if not _GROUP.fullmatch(group := self.group_of_schema(schema)):
            return f"its group would have more than 200 characters: {group!r}"
        return None

    def each(self) -> tuple[Settings, ...]:
        """The settings of every outbox to harvest: these alone, or one for each of `outboxes`.

        An element whose `table` names many stands for as many outboxes: see `schema.outboxes`.

        Raises:
            InvalidSetting: one of the `outboxes` is wrong.
        """
        if not self.outboxes:
            return (self,)
        ours = {name: getattr(self, name) for name in self.model_fields_set - {"outboxes"}}
        of_the_process = {"outboxes", *LogSettings.model_fields}
        found = []
        for number, own in enumerate(self.outboxes):
            if unknown := own.keys() - type(self).model_fields.keys() | own.keys() & of_the_process:
                raise InvalidSetting(
                    f"OUTBOX_OUTBOXES, number {number}: {min(unknown)!r} is not a setting of an outbox"
                )
            try:
                found.append(Settings(**{**ours, "outboxes": [], **own}))
            except InvalidSetting as error:
                raise InvalidSetting(f"OUTBOX_OUTBOXES, number {number}: {error}") from None
        return tuple(found)

    def environment(self) -> dict[str, str]:
        """The settings as environment variables for another process. Secrets are in plain text."""
        plain = self.model_dump(mode="json", exclude={"dsn", "retention"}, exclude_none=True)
        given = {
            name: each if isinstance(each, str) else json.dumps(each, sort_keys=True) for name, each in plain.items()
        }
        given["dsn"] = self.dsn.get_secret_value()
        if self.retention is not None:
            given["retention"] = f"{self.retention.days}d"
        return {f"OUTBOX_{name.upper()}": text for name, text in given.items()}

    @field_validator("kafka", mode="before")
    @classmethod
    def _kafka_is_text(cls, kafka: Any) -> Any:
        """Turn all values into text, as librdkafka expects it. JSON's true and 5 are accepted, too."""
        if not isinstance(kafka, dict):
            raise ValueError("expected a JSON object of librdkafka properties")
        return {name: _property_text(value) for name, value in kafka.items()}

    @field_validator("kafka")
    @classmethod
    def _kafka_keeps_promises(cls, kafka: dict[str, str]) -> dict[str, str]:
        for name, value in kafka.items():
            if _NOT_TAKEN.search(name + value):
                raise ValueError(f"{name!r} and its value: expected texts without NUL and without lone surrogates")
            if reason := LOAD_BEARING_PROPERTIES.get(name):
                raise ValueError(f"the property {name!r} cannot be set here: it belongs to {reason}")
        return kafka


def host_and_port(listen: str) -> tuple[str, int]:
    """Split OUTBOX_LISTEN into host and port. An IPv6 address must be in brackets.

    Raises:
        ValueError: it has another form.
    """
    found = _ADDRESS.fullmatch(listen)
    if not found or not 1 <= int(found["port"]) <= 65_535:
        raise ValueError("expected a port from 1 to 65535, alone or as HOST:PORT or [IPV6]:PORT")
    return found["ipv6"] or found["host"] or LOCALHOST, int(found["port"])


def _mechanism(kafka: dict[str, str]) -> str | None:
    return kafka.get("sasl.mechanism", kafka.get("sasl.mechanisms"))


def _makes_tokens_itself(kafka: dict[str, str]) -> bool:
    """Whether librdkafka makes tokens that nobody signs, which is for tests."""
    return kafka.get("enable.sasl.oauthbearer.unsecure.jwt") in ("true", "t", "1")


def _has_stray_at(dsn: str) -> bool:
    """Whether libpq would take a part of a URI's password for the host or the database, and name it in its errors."""
    _, scheme, rest = dsn.partition("://")
    if not scheme or not dsn.startswith("postgres"):
        return False
    userinfo, at, place = rest.partition("@")
    if not at or "/" in userinfo:
        return "@" in rest.partition("?")[0]
    return "@" in place.partition("?")[0]


def _property_text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _one_line(error: ValidationError) -> str:
    """The first error, on one line that begins with the setting's environment variable: `OUTBOX_DELIVERY: …`."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return str(first["msg"]).removeprefix("Value error, ")
    field = str(first["loc"][0])
    setting = f"OUTBOX_{field.upper()}"
    if first["type"] == "missing":
        return f"{setting} is not set: {Settings.model_fields[field].description}"
    problem = first["msg"].removeprefix("Value error, ").replace("\n", " ")
    given = "" if field in _SECRETS else f" (given: {first['input']!r})"
    return f"{setting}: {problem}{given}"
