"""When a leader gives its shard to another harvester, which can do better or owns the shard's partition.

A leader's way to one broker can be dead while its heartbeats, which go to another broker, arrive as ever. Its election
sees nothing wrong, and its requests run into their time limits only after half a minute. A harvester that stands by may
reach all brokers. But it may also be that the broker is dead for everybody; then another leader could do no better, and
would have to take over in vain. So the leader asks, and steps down only for somebody who can do better.

    role      what is seen                                                 what follows
    leader    a request to Kafka takes longer than `STALLED_SECONDS`       its heartbeats say `stalled`; it asks all
                                                                           brokers for a sign of life
    follower  the heartbeats of another harvester's term say `stalled`     it asks all brokers, and Postgres, for a
                                                                           sign of life
    follower  all brokers and Postgres have answered it                    its heartbeats say that it can replace the
                                                                           leader
    leader    a broker has not answered it, and a follower can replace it  it resigns in favour of that follower, and
                                                                           does not compete for a while
    follower  the leader resigns in favour of another follower             it does not compete for a moment

A candidate that is stalled while it takes over does the same as a leader.

Kafka's group coordinator spreads the partitions of the leader topic evenly over the harvesters. But after a crash, for
example, a harvester leads shards whose partitions are then given to others. Where that is uneven, leadership follows
ownership:

    role      what is seen                                                 what follows
    follower  it owns the partition, another leads it, and the shards are  it asks all brokers, and Postgres, for a
              uneven (`core.shard_leaders`), for `OWNED_SECONDS`           sign of life
    follower  all brokers and Postgres have answered it                    its heartbeats say that it can replace the
                                                                           leader, and owns the partition
    follower  a term that it has asked for has failed, or it has been      it says nothing of the kind for a while
              stalled
    leader    it does not own the partition, and the owner can replace it  it finishes its transaction, and resigns in
                                                                           favour of the owner

No clock of its own: `now` is in monotonic seconds of this process.
"""

from __future__ import annotations

from outbox_plugin.core.backoff import Backoff
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat

STALLED_SECONDS = 0.5  # Most requests take a hundredth of this. If one takes longer, nothing but the question follows.
OWNED_SECONDS = 3.0  # By then, the members of the group have settled, and so has the leader.
FRESH_SECONDS = 3.0  # What was heard, or asked, longer ago counts for nothing.
STAND_BACK_SECONDS = 3.0  # How long a leader that has resigned leaves the shard to the others.
SUCCESSOR_SECONDS = 1.0  # How long other followers leave the shard to the successor, whose heartbeats come much sooner.
# Between two resignations, or two attempts of an owner: a way that comes and goes must not make leaders take turns all
# the time.
PAUSE_FIRST, PAUSE_LAST = 30.0, 300.0


class LeadershipTransfer:
    """One harvester's view of one shard: who could replace its own term, or another's term that it could replace."""

    def __init__(self) -> None:
        self._owns = False
        self._uneven_since: float | None = None  # Since when we have owned the partition, and led too few shards.
        self._leader: str | None = None  # Another's term; since when it leads, when it was last heard, and stalled.
        self._leads_since: float | None = None
        self._leader_heard_at = 0.0
        self._leader_is_stalled = False
        self._waiting_since: float | None = None
        self._successor: str | None = None  # The instance that has last said that it can replace our term, and when.
        self._successor_heard_at = 0.0
        self._owner: str | None = None  # The one that has last said so as the owner of the partition, and when.
        self._owner_heard_at = 0.0
        self._resigned = _Pause()
        self._given_to: str | None = None  # The last owner in favour of which a term of ours has ended.
        self._given = _Pause()
        self._asked_at: float | None = None  # When we last asked for the shard as the owner of the partition.
        self._failed = _Pause()

    def receive(self, heartbeat: LeaderHeartbeat, own_term: str | None, now: float) -> None:
        """Take in a heartbeat of this shard.

        Args:
            heartbeat: of any harvester.
            own_term: the leader id of our own term; None while following.
            now: the time.
        """
        if own_term is not None and heartbeat.can_replace == own_term:
            self._successor, self._successor_heard_at = heartbeat.instance, now
            if heartbeat.owns:
                self._owner, self._owner_heard_at = heartbeat.instance, now
        elif heartbeat.leader_id != own_term and heartbeat.phase in ("candidate", "leader"):
            if heartbeat.leader_id != self._leader:
                self._leader, self._leads_since = heartbeat.leader_id, None
            if heartbeat.phase == "leader" and self._leads_since is None:
                self._leads_since = now
            self._leader_heard_at, self._leader_is_stalled = now, heartbeat.stalled

    def set_ownership(self, *, owns: bool, is_uneven: bool, now: float) -> None:
        """Take in whether we own the shard's partition.

        Args:
            owns: whether we do.
            is_uneven: whether the shards would be spread more evenly if we led this one.
            now: the time.
        """
        self._owns = owns
        if not owns or not is_uneven:
            self._uneven_since = None
        elif self._uneven_since is None:
            self._uneven_since = now

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
        return now - FRESH_SECONDS if self.replaceable_leader(now) is not None else None

    def replaceable_leader(self, now: float) -> str | None:
        """The leader id of another's term that we could replace if all brokers answer us; None if there is none."""
        if self._leader is None or now - self._leader_heard_at > FRESH_SECONDS:
            return None
        return self._leader if self._leader_is_stalled or self.leads_what_we_own(now) else None

    def leads_what_we_own(self, now: float) -> bool:
        """Whether another has led our partition's shard, unevenly, for long, and we have not failed to lead it."""
        if self._uneven_since is None or self._leads_since is None or not self._failed.is_over(now):
            return False
        return now - max(self._uneven_since, self._leads_since) >= OWNED_SECONDS

    def successor(self, all_brokers_answer: bool | None, now: float) -> str | None:
        """The instance in favour of which our own term is to end because it is stalled; None if it is to go on.

        Args:
            all_brokers_answer: what we found when we asked all brokers; None if that is not known yet.
            now: the time.
        """
        if not self.is_stalled(now) or all_brokers_answer is not False or not self._resigned.is_over(now):
            return None
        return self._successor if now - self._successor_heard_at <= FRESH_SECONDS else None

    def owner(self, now: float) -> str | None:
        """The instance in favour of which our own term is to end because that owns the partition; None if none."""
        if self._owns or self._owner is None or now - self._owner_heard_at > FRESH_SECONDS:
            return None
        return self._owner if self._owner != self._given_to or self._given.is_over(now) else None

    def mark_resigned(self, now: float) -> None:
        """Note that our term ends because it is stalled, in favour of a follower."""
        self._resigned.begin(now)
        self._failed.begin(now)
        self._successor = self._owner = self._asked_at = None

    def mark_given(self, owner: str, now: float) -> None:
        """Note that our term ends in favour of the owner: it does not for the same one again for a while.

        A harvester that is started again is another instance, and gets its share at once.
        """
        if owner != self._given_to:
            self._given_to, self._given = owner, _Pause()
        self._given.begin(now)
        self._successor = self._owner = None

    def mark_asked(self, now: float) -> None:
        """Note that we have told the leader that we can replace it, and own the partition."""
        self._asked_at = now

    def mark_failed(self, now: float) -> None:
        """Note that our term has ended by an error. If we had asked for it, we ask for no other one for a while.

        Where nobody asked, Postgres or Kafka may have failed for all. Then whoever leads first afterwards may lead most
        shards, and the others need not wait.
        """
        if self._asked_at is not None and now - self._asked_at <= PAUSE_FIRST:
            self._failed.begin(now)
        self._asked_at = None


class _Pause:
    """A pause that is longer each time, as long as one follows the other."""

    def __init__(self) -> None:
        self._until: float | None = None
        self._backoff = Backoff(PAUSE_FIRST, PAUSE_LAST)

    def begin(self, now: float) -> None:
        """Begin the next pause."""
        if self._until is None or now - self._until > PAUSE_LAST:
            self._backoff.succeeded()
        self._until = now + self._backoff.wait()

    def is_over(self, now: float) -> bool:
        """Whether there is no pause at `now`."""
        return self._until is None or now >= self._until
