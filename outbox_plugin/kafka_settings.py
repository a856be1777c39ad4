"""The settings of those who need Kafka, and no Postgres."""

from __future__ import annotations

from typing import Any

from pydantic import SecretStr

from outbox_plugin.settings import Settings


class KafkaSettings(Settings):
    """Settings of one who needs no Postgres: from keyword arguments, the environment, or `.env`."""

    dsn: SecretStr = SecretStr("")


def kafka_settings(
    bootstrap_servers: str | None, kafka: dict[str, str] | None, listen: str | None = None
) -> KafkaSettings:
    """Return settings with the brokers and librdkafka properties that are given.

    Args:
        bootstrap_servers: the brokers; those of the environment if it is None.
        kafka: librdkafka properties; those of the environment if it is None.
        listen: the port that is served; none if it is None. It never comes from the environment, because a consumer in
            a run of Dagster has the environment of a harvester that listens there.

    Raises:
        InvalidSetting: in one line, what is wrong.
    """
    given: dict[str, Any] = {"bootstrap_servers": bootstrap_servers, "kafka": kafka}
    return KafkaSettings(**{name: value for name, value in given.items() if value is not None}, listen=listen)
