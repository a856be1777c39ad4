"""Requests that a Kafka client repeats by itself, and what a leader does about the copies that arrive late.

A client whose connection breaks before the answer sends the request again, within the same producer epoch and without a
log line. The first copy may still be on its way. An EndTxn that arrives late ends whatever transaction is open by then:
part of the next one. Brokers with transaction version 2 (KIP-890) refuse such a copy, but only from clients that speak
that version, and librdkafka 2.16 does not (its issue 5423).

So no transaction is begun on a producer whose last EndTxn may have a copy on its way. Such a producer is *in doubt*.
A new producer takes its place. Its InitProducerId raises the epoch, so the broker refuses every request of the old one.

How doubt is noticed: librdkafka waits for `retry.backoff.ms`, less a jitter of 20 %, before it repeats a request. An
EndTxn that was answered sooner was sent once. One that took longer may have been repeated. A transaction that failed
leaves its producer in doubt as well, however long it took: an EndTxn may have been sent.

Fencing would end a successor's lead if the leader is a zombie by then. So a leader looks at the progress record before
and after it fences: a record of another term means that this term is over.
"""

from __future__ import annotations

from outbox_plugin.core.progress import ProgressRecord
from outbox_plugin.errors import Fenced

# It is longer than most commits take, so that few producers are replaced without need. It is short, because the first
# repeat of any request waits for so long.
RETRY_BACKOFF_MS = 250
_JITTER = 0.2  # RD_KAFKA_RETRY_JITTER_PERCENT of librdkafka.
UNREPEATED_SECONDS = RETRY_BACKOFF_MS / 1000 * (1 - _JITTER)


def may_have_been_repeated(seconds: float) -> bool:
    """Whether a request that was answered after `seconds` may have been sent more than once."""
    return seconds >= UNREPEATED_SECONDS


def require_own_record(record: ProgressRecord | None, leader_id: str) -> None:
    """Check that the shard's last committed progress record is one of this term's.

    Raises:
        Fenced: another term has written since, so it leads.
    """
    if record is None or record.leader_id != leader_id:
        leader = "nobody's" if record is None else f"{record.leader_id}'s"
        raise Fenced(f"Kafka: another harvester took the shard over: the last progress record is {leader}")
