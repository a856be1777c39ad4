"""When a leader that Kafka does not answer gives its shard to a harvester that Kafka does answer.

A leader's way to one broker can be dead while its heartbeats, which go to another broker, arrive as ever. Its election
sees nothing wrong, and its requests run into their time limits only after half a minute. A harvester that stands by may
reach all brokers. But it may also be that the broker is dead for everybody; then another leader could do no better, and
would have to take over in vain. So the leader asks, and steps down only for somebody who can do better.

    role      what is seen                                                 what follows
    leader    a request to Kafka takes longer than `STALLED_SECONDS`       its heartbeats say `stalled`; it asks all
                                                                           brokers for a sign of life
    follower  the heartbeats of another harvester's term say `stalled`     it asks all brokers for a sign of life
    follower  all brokers have answered it                                 its heartbeats say that it can replace the
                                                                           leader
    leader    a broker has not answered it, and a follower can replace it  it resigns in favour of that follower, and
                                                                           does not compete for a while
    follower  the leader resigns in favour of another follower             it does not compete for a moment

A candidate that is stalled while it takes over does the same as a leader.

No clock of its own: `now` is in monotonic seconds of this process.
"""

from __future__ import annotations

from outbox_plugin.core.backoff import Backoff
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat

STALLED_SECONDS = 0.5  # Most requests take a hundredth of this. If one takes longer, nothing but the question follows.
FRESH_SECONDS = 3.0  # What was heard, or asked, longer ago counts for nothing.
STAND_BACK_SECONDS = 3.0  # How long a leader that has resigned leaves the shard to the others,
SUCCESSOR_SECONDS = 1.0  # and how long other followers leave it to its successor: that is heard long before.
# Between two resignations: a way that comes and goes must not make leaders take turns all the time.
RESIGN_AGAIN_FIRST, RESIGN_AGAIN_LAST = 30.0, 300.0


class LeadershipTransfer:
    """One harvester's view of one shard: whether its own term is stalled, or another's that it could replace."""

    def __init__(self) -> None:
        self._stalled_leader: str | None = None  # Another's term, and when it was last heard to be stalled.
        self._stalled_heard_at = 0.0
        self._waiting_since: float | None = None
        self._successor: str | None = None  # The instance that has last said that it can replace our term, and when.
        self._successor_heard_at = 0.0
        self._resign_not_before: float | None = None
        self._backoff = Backoff(RESIGN_AGAIN_FIRST, RESIGN_AGAIN_LAST)

    def receive(self, heartbeat: LeaderHeartbeat, own_term: str | None, now: float) -> None:
        """Take in a heartbeat of this shard.

        Args:
            heartbeat: of any harvester.
            own_term: the leader id of our own term; None while following.
            now: the time.
        """
        if own_term is not None and heartbeat.can_replace == own_term:
            self._successor, self._successor_heard_at = heartbeat.instance, now
        elif heartbeat.leader_id != own_term and heartbeat.phase in ("candidate", "leader"):
            self._stalled_leader, self._stalled_heard_at = heartbeat.leader_id if heartbeat.stalled else None, now

    def set_waiting_since(self, since: float | None) -> None:
        """Take in since when our own term has waited for one answer of Kafka's; None if it waits for none."""
        if since != self._waiting_since:
            self._successor = None  # That was said of an earlier request.
        self._waiting_since = since

    def is_stalled(self, now: float) -> bool:
        """Whether our own term waits for Kafka longer than usual."""
        return self._waiting_since is not None and now - self._waiting_since > STALLED_SECONDS

    def ask_since(self, now: float) -> float | None:
        """When a question to all brokers must have begun so that its answer counts; None if nobody need ask."""
        if self._waiting_since is not None:
            return max(self._waiting_since, now - FRESH_SECONDS) if self.is_stalled(now) else None
        return now - FRESH_SECONDS if self.stalled_leader(now) is not None else None

    def stalled_leader(self, now: float) -> str | None:
        """The leader id of another harvester's term that is stalled; None if there is none."""
        return self._stalled_leader if now - self._stalled_heard_at <= FRESH_SECONDS else None

    def successor(self, all_brokers_answer: bool | None, now: float) -> str | None:
        """The instance in favour of which our own term is to end; None if it is to go on.

        Args:
            all_brokers_answer: what we found when we asked all brokers; None if that is not known yet.
            now: the time.
        """
        if not self.is_stalled(now) or all_brokers_answer is not False:
            return None
        if self._resign_not_before is not None and now < self._resign_not_before:
            return None
        return self._successor if now - self._successor_heard_at <= FRESH_SECONDS else None

    def mark_resigned(self, now: float) -> None:
        """Note that our term ends in favour of a follower."""
        if self._resign_not_before is None or now - self._resign_not_before > RESIGN_AGAIN_LAST:
            self._backoff.succeeded()
        self._resign_not_before = now + self._backoff.wait()
        self._successor = None
