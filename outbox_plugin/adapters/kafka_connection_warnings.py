"""Warns why a client that runs cannot connect to Kafka."""

from __future__ import annotations

import time
from logging import Logger

from confluent_kafka import KafkaError

WARN_SECONDS = 60.0
# A single connection that ends is none: another broker may lead by now.
_WARNED_OF = {KafkaError._SSL, KafkaError._AUTHENTICATION, KafkaError._RESOLVE, KafkaError._ALL_BROKERS_DOWN}


class ConnectionWarnings:
    """librdkafka's `error_cb` of a consumer.

    librdkafka goes on by itself: a broker that restarts, gets another certificate, or finds a token expired refuses
    connections for a while. A poll returns nothing meanwhile, and no error. Each attempt that fails is reported here,
    some hundred a second, so each reason is logged once a minute at most.
    """

    def __init__(self, logger: Logger) -> None:
        """Nothing is logged yet."""
        self._logger = logger
        self._logged_at: dict[int, float] = {}

    def __call__(self, error: KafkaError) -> None:
        """Log the error, unless it passes or was logged just before."""
        now, code = time.monotonic(), error.code()
        if code in _WARNED_OF and now - self._logged_at.get(code, float("-inf")) >= WARN_SECONDS:
            self._logged_at[code] = now
            self._logger.warning("Kafka, while consuming: %s", error.str())
