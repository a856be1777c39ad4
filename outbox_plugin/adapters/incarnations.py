"""Which incarnation of each topic is read: one that was deleted and made anew has the same name, and another id."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaException, TopicCollection

from outbox_plugin.adapters.kafka import Admin
from outbox_plugin.printable import logger_of
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.kafka")

ASK_SECONDS = 5.0  # So often it is asked whether a topic was made anew; as often a consumer learns of its partitions.
ANSWER_SECONDS = 10.0


class Incarnations:
    """The ids of topics, as Kafka last said them (KIP-516)."""

    def __init__(self, settings: Settings) -> None:
        self._admin = Admin(settings).client
        self._ids: dict[str, str] = {}
        self._asked: dict[str, Future[Any]] = {}
        self._ask_at = 0.0

    def of(self, topic: str) -> str:
        """The id of a topic; its name where Kafka knows none."""
        return self._ids.get(topic, topic)

    def known(self) -> dict[str, str]:
        """The ids of the topics that Kafka has said, by their names."""
        return dict(self._ids)

    def look_up(self, topics: Iterable[str]) -> set[str]:
        """Ask for these topics, and wait for the answer; returns those that were made anew since they were known."""
        self._ask(topics)
        for future in self._asked.values():
            with suppress(KafkaException, TimeoutError):  # `_take_in` says so.
                future.result(ANSWER_SECONDS + 1)
        return self._take_in()

    def changed(self, topics: Collection[str]) -> set[str]:
        """Those of the topics that were made anew. Waits for nothing: it asks, and a later call has the answer."""
        if self._asked:
            return self._take_in() if all(future.done() for future in self._asked.values()) else set()
        if topics and time.monotonic() >= self._ask_at:
            self._ask(topics)
        return set()

    def _ask(self, topics: Iterable[str]) -> None:
        self._ask_at = time.monotonic() + ASK_SECONDS
        names = sorted(set(topics))
        self._asked = (
            self._admin.describe_topics(TopicCollection(names), request_timeout=ANSWER_SECONDS) if names else {}
        )

    def _take_in(self) -> set[str]:
        changed = set()
        for topic, future in self._asked.items():
            try:
                found = str(future.result(0).topic_id)
            except (KafkaException, TimeoutError) as error:
                logger.info("Kafka does not say which incarnation of the topic %s there is: %s", topic, error)
                continue
            if self._ids.get(topic, found) != found:
                changed.add(topic)
            self._ids[topic] = found
        self._asked = {}
        return changed
