"""Topics that no row may name: whoever may insert into the outbox must not write what harvesters and brokers read.

A progress record of somebody else's making deletes rows that were never published, and a heartbeat of somebody else's
making deposes a leader. The harvester may write to these topics, so Kafka's own access control does not stop it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from outbox_plugin.adapters.kafka_names import LEADER_SUFFIX, PROGRESS_SUFFIX, KafkaNames
from outbox_plugin.emit.event import KAFKAS_OWN
from outbox_plugin.settings import Settings


class ReservedTopics:
    """Says why a topic is not for events: called with its name, it returns the reason, or None where it is."""

    def __init__(self, settings: Settings, groups: Callable[[], Iterable[str]]) -> None:
        """No server is asked yet.

        Args:
            settings: of the outbox that is harvested.
            groups: returns the groups of all outboxes that the database knows now. It is asked only about a name that
                could be one of theirs, as other outboxes may come while this one is harvested.
        """
        names = KafkaNames.of(settings)
        self._ours = {names.leader_topic, names.progress_topic}
        self._groups = groups

    def __call__(self, topic: str) -> str | None:
        """Why `topic` is not for events; None where it is.

        Raises:
            StoreUnavailable: the database does not say.
        """
        if topic.startswith(KAFKAS_OWN):
            return f"names that begin with {KAFKAS_OWN} are for Kafka's own topics, not for events"
        if topic in self._ours or self._is_of_a_group(topic):
            return "the harvesters' own topic, not one for events"
        return None

    def _is_of_a_group(self, topic: str) -> bool:
        for suffix in (LEADER_SUFFIX, PROGRESS_SUFFIX):
            if topic.endswith(suffix):
                return topic.removesuffix(suffix) in self._groups()
        return False
