"""Reads topics with Spark's Kafka source, and adds the source to a session that lacks it.

It works with any session, even a running one: the source's packages are added to it when they are first needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from outbox_plugin.errors import InvalidSetting, ServerRefused
from outbox_plugin.settings import Settings

SPARK_SAYS = (PySparkException, Py4JJavaError)
# With the defaults, a consumer returns to Spark after every 500 records, and fetches less at once.
_TUNING = {"max.poll.records": "20000", "max.partition.fetch.bytes": "16000000", "fetch.max.bytes": "64000000"}
_AS_IN_JAVA = ("security.protocol", "sasl.mechanism", "client.id", "client.rack", "socket.connection.setup.timeout.ms")
_LOGINS = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


def read_topics(spark: SparkSession, settings: Settings, topics: Sequence[str]) -> DataFrame:
    """The records that a `read_committed` consumer sees in topics, from their beginning to their present end.

    Args:
        spark: the session that reads.
        settings: name Kafka, and the source's packages.
        topics: their names.

    Raises:
        InvalidSetting: Spark's Kafka source cannot be downloaded by the coordinates that are set.
        ServerRefused: there is no such topic, or Kafka does not answer.
    """
    return _load(spark, settings, {"subscribe": ",".join(topics)})


def read_offsets(
    spark: SparkSession, settings: Settings, topic: str, begin: Mapping[int, int], end: Mapping[int, int]
) -> DataFrame:
    """The records of a range of offsets that a `read_committed` consumer sees, with headers.

    Evaluating the DataFrame fails if Kafka has deleted some of the records.

    Args:
        spark: the session that reads.
        settings: name Kafka, and the source's packages.
        topic: the topic.
        begin: the first offset of each partition.
        end: the offset after the last one of each partition.

    Raises:
        InvalidSetting: Spark's Kafka source cannot be downloaded by the coordinates that are set.
        ServerRefused: Kafka does not answer.
    """

    def text(offsets: Mapping[int, int]) -> str:
        return json.dumps({topic: {str(partition): offset for partition, offset in offsets.items()}})

    return _load(
        spark,
        settings,
        {
            "assign": json.dumps({topic: sorted(begin)}),
            "startingOffsets": text(begin),
            "endingOffsets": text(end),
            "failOnDataLoss": "true",
        },
    )


def _load(spark: SparkSession, settings: Settings, wanted: Mapping[str, str]) -> DataFrame:
    properties = {
        "bootstrap.servers": settings.bootstrap_servers,
        "isolation.level": "read_committed",
        **_TUNING,
        **java_properties(settings.kafka),
    }
    options = {f"kafka.{name}": value for name, value in properties.items()}
    source = spark.read.format("kafka").options(**options, **wanted, includeHeaders="true")
    try:
        return _resolved(source.load())
    except SPARK_SAYS as error:
        if "Failed to find data source: kafka" not in str(error):
            raise
    add_packages(spark, settings.spark_packages)
    return source.load()


def _resolved(records: DataFrame) -> DataFrame:
    """`records`, resolved by Spark. Spark Connect's server does that only when it is asked for the schema."""
    _ = records.schema
    return records


def add_packages(spark: SparkSession, coordinates: str) -> None:
    """Add the packages that `coordinates` name, separated by commas, and their dependencies to `spark`.

    A package that is named after the first one replaces the version of it that the first one depends on.

    Raises:
        InvalidSetting: they cannot be downloaded.
    """
    packages = [each.strip().split(":") for each in coordinates.split(",") if each.strip()]
    if any(len(parts) not in (2, 3) for parts in packages):
        raise InvalidSetting(
            f"OUTBOX_SPARK_PACKAGES: expected group:name:version, comma separated; given {coordinates}"
        )
    for number, (group, name, *version) in enumerate(packages):
        others = ",".join(f"{each[0]}:{each[1]}" for each in packages if each[1] != name)
        asked = f"exclude={others}" if others and not number else f"transitive={'false' if number else 'true'}"
        uri = f"ivy://{group}:{name}:{version[0] if version else spark.version}?{asked}"
        try:
            spark.sql(f"ADD JAR '{uri}'")
        except SPARK_SAYS as error:
            raise InvalidSetting(
                f"OUTBOX_SPARK_PACKAGES: {coordinates} cannot be downloaded: {_reason(error)}; "
                "if the registry lacks a dependency of one of them, name another version of the dependency beside it"
            ) from None


@contextmanager
def spark_errors_as_refusals(settings: Settings, topics: Sequence[str]) -> Iterator[None]:
    """Turn errors that Kafka reports through Spark into ours.

    Raises:
        ServerRefused: there is no such topic, or Kafka does not answer.
    """
    try:
        yield
    except SPARK_SAYS as error:
        if "kafka" not in str(error).lower():
            raise
        where = f"{', '.join(topics)} of {settings.bootstrap_servers}"
        raise ServerRefused(f"Spark cannot read {where}: {_reason(error)}") from None


def java_properties(given: Mapping[str, str]) -> dict[str, str]:
    """Translate librdkafka's properties for TLS and SASL to Java's. Properties for tuning are left out.

    Raises:
        InvalidSetting: one of them has no counterpart.
    """
    known = {{"sasl.mechanisms": "sasl.mechanism"}.get(name, name): value for name, value in given.items()}
    java = {name: known[name] for name in _AS_IN_JAVA if name in known}
    if "ssl.ca.location" in known:
        java |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": known["ssl.ca.location"]}
    if known.get("ssl.endpoint.identification.algorithm") == "none":
        java["ssl.endpoint.identification.algorithm"] = ""
    if known.get("sasl.mechanism") == "OAUTHBEARER":
        raise InvalidSetting("OUTBOX_KAFKA: Spark's Kafka source cannot log in by sasl.mechanism=OAUTHBEARER")
    if "sasl.username" in known:
        mechanism = known.get("sasl.mechanism", "")
        if mechanism not in _LOGINS:
            expected = ", ".join(_LOGINS)
            raise InvalidSetting(f"OUTBOX_KAFKA: sasl.mechanism is {mechanism!r}; Spark logs in by {expected}")
        login = f'username="{_escaped(known["sasl.username"])}" password="{_escaped(known.get("sasl.password", ""))}"'
        java["sasl.jaas.config"] = f"{_LOGINS[mechanism]} required {login};"
    for name in ("ssl.certificate.location", "ssl.key.location", "ssl.keystore.location"):
        if name in known:
            raise InvalidSetting(f"OUTBOX_KAFKA: the property {name!r} cannot be passed on to Spark's Kafka source")
    return java


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _reason(error: BaseException) -> str:
    """The message of the innermost cause, without the names of Java's exceptions."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line.partition(": ")[2] for line in lines if line.startswith(("Caused by: ", ": "))]
    return (causes[-1:] or lines or [type(error).__name__])[0][:300]
