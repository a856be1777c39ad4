"""Whether all brokers of the cluster answer this process."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from itertools import chain

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import ConfigResource, ResourceType

from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.kafka_clients import answer_of
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.settings import Settings

ANSWER_SECONDS = 1.0  # For all brokers together. Where nothing is wrong, they need a tenth of it.
_NO_ANSWER = {
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
}


def all_brokers_answer(settings: Settings, topic: str) -> bool:
    """Whether each broker that the cluster lists answers within `ANSWER_SECONDS`, on new connections.

    Each is asked for its configuration, because that request goes to the one broker that it is about. A broker that
    refuses to show it has answered, too, so no right is needed.

    Args:
        settings: which Kafka.
        topic: one that exists; the answer to a question about it lists the brokers.
    """
    deadline = time.monotonic() + ANSWER_SECONDS
    with suppress(KafkaException, LogUnavailable, TimeoutError), closing(KafkaAdmin(settings)) as admin:
        brokers = admin.client.list_topics(topic, timeout=ANSWER_SECONDS).brokers
        left = max(0.1, deadline - time.monotonic())
        asked = [  # A request may be about one broker only.
            admin.client.describe_configs([ConfigResource(ResourceType.BROKER, str(number))], request_timeout=left)
            for number in brokers
        ]
        for request in chain.from_iterable(each.values() for each in asked):
            try:
                answer_of(request, left + ANSWER_SECONDS)
            except KafkaException as error:
                if error.args[0].code() in _NO_ANSWER:
                    return False
        return bool(brokers)
    return False
