"""The ids of topics (KIP-516): a topic that was deleted and recreated has the same name, and another id."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from confluent_kafka import KafkaException, TopicCollection

from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.kafka_clients import answer_of
from outbox_plugin.printable import logger_of
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.kafka")

ASK_SECONDS = 5.0  # Between two checks whether a topic was recreated. Consumers refresh their metadata as often.
ANSWER_SECONDS = 10.0


class Answer(NamedTuple):
    """`recreated` has the topics whose ids have changed. `known` has the topics whose ids Kafka has returned."""

    recreated: set[str]
    known: set[str]


class TopicIds:
    """The ids of topics, as Kafka last returned them."""

    def __init__(self, settings: Settings) -> None:
        self._admin = KafkaAdmin(settings)
        self._ids: dict[str, str] = {}
        self._asked: dict[str, Future[Any]] = {}
        self._ask_at = 0.0

    def close(self) -> None:
        """Disconnect. Safe to call twice."""
        self._admin.close()

    def of(self, topic: str) -> str:
        """The id of a topic; empty where Kafka has returned none."""
        return self._ids.get(topic, "")

    def known(self) -> dict[str, str]:
        """The ids that Kafka has returned, by the names of their topics."""
        return dict(self._ids)

    def look_up(self, topics: Iterable[str]) -> Answer:
        """Ask for the ids of these topics, and wait for the answer. A request of `recreated` goes on meanwhile."""
        asked = self._ask(topics)
        for future in asked.values():
            with suppress(KafkaException, TimeoutError):  # `_update` logs it.
                answer_of(future, ANSWER_SECONDS + 1)
        return self._update(asked)

    def recreated(self, topics: Collection[str]) -> set[str]:
        """The topics that were recreated. It does not wait: it sends a request, and a later call returns the answer."""
        if self._asked:
            if not all(future.done() for future in self._asked.values()):
                return set()
            asked, self._asked = self._asked, {}
            return self._update(asked).recreated
        if topics and time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + ASK_SECONDS
            self._asked = self._ask(topics)
        return set()

    def _ask(self, topics: Iterable[str]) -> dict[str, Future[Any]]:
        names = sorted(set(topics))
        if not names:
            return {}
        return self._admin.client.describe_topics(TopicCollection(names), request_timeout=ANSWER_SECONDS)

    def _update(self, asked: dict[str, Future[Any]]) -> Answer:
        recreated, known = set(), set()
        for topic, future in asked.items():
            try:
                found = str(answer_of(future, 0).topic_id)
            except (KafkaException, TimeoutError) as error:
                logger.info("Kafka does not return the id of the topic %s: %s", topic, error)
                continue
            if self._ids.get(topic, found) != found:
                recreated.add(topic)
            self._ids[topic] = found
            known.add(topic)
        return Answer(recreated, known)
