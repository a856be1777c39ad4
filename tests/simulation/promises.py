"""Judges the promises when a schedule is over, each from the state of the servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import inf

from outbox_plugin.relay.at_least_once import CONFIRM_SECONDS
from tests.simulation.harvesters import Simulation
from tests.simulation.postgres import Event

ELECTED_SECONDS = 2.0  # When the group's first leader leads at the latest.
AT_REST_SECONDS = 45.0  # The longest delay at rest: a sweep may come after half a minute, a new leader after seconds.


def broken(simulation: Simulation) -> list[str]:
    """The promises that were broken, one sentence for each."""
    seconds = simulation.drained_in
    late = [f"late: rows left {seconds:.1f} s after all was well"] if seconds > AT_REST_SECONDS else []
    judges = (_order, _presence, _leadership, _replaced, _sent_again, _bad_rows)
    return [*late, *(sentence for judge in judges for sentence in judge(simulation))]


def _arrived(simulation: Simulation) -> dict[tuple[str, str], list[str]]:
    """What a `read_committed` consumer sees, per partition."""
    return {
        partition: [each.value for each in records if each.transaction is None or each.transaction.committed]
        for partition, records in simulation.broker.partitions.items()
    }


def _presence(simulation: Simulation) -> Iterator[str]:
    """Promises 1, 2 and 4: no loss, no phantom, exactly once."""
    database = simulation.database
    waiting = {row.event.name for row in (*database.rows.values(), *database.dead)}
    times: dict[str, int] = {}
    for values in _arrived(simulation).values():
        for value in values:
            times[value] = times.get(value, 0) + 1
    for value in times.keys() - database.by_name.keys():
        yield f"phantom: {value} arrived, and nobody wrote it"
    for event in database.events:
        count = times.get(event.name, 0)
        if event.committed is None:
            if count:
                yield f"phantom: {event.name} was rolled back, and arrived"
        elif not count:
            if not event.erased and event.name not in waiting:
                yield f"loss: {event.name} ({event.key}) was committed, and is nowhere"
        elif not simulation.may_repeat(event) and not event.restored:
            if count > 1:
                yield f"repeated: {event.name} ({event.key}) arrived {count} times"
            if event.name in waiting:
                yield f"repeated: {event.name} ({event.key}) arrived, and is still to be sent"


def _order(simulation: Simulation) -> Iterator[str]:
    """Promise 3: of two rows with one key, the first by commit and begin, or by place, appears first."""
    by_name = simulation.database.by_name
    for partition, values in _arrived(simulation).items():
        seen = [by_name[value] for value in dict.fromkeys(values) if value in by_name]
        for place, later in enumerate(seen):
            for behind in seen[place + 1 :]:
                if simulation.was_at_least_once and (behind.erased or behind.dead_lettered):
                    continue  # It was in flight when its row was erased, or became a dead letter.
                if behind.forgotten:
                    continue
                if _is_before(behind, later):
                    yield f"order: {behind.name} is before {later.name} in {partition}, and arrived behind it"


def _is_before(first: Event, second: Event) -> bool:
    if first.restored or second.restored or "own" in (first.topic, second.topic):
        return False
    if first.given_again or second.given_again:
        return False  # Below what has been read, a row is found late.
    if first.transaction == second.transaction:
        return first.place_in_transaction < second.place_in_transaction
    return first.committed is not None and first.committed < second.began


def _leadership(simulation: Simulation) -> Iterator[str]:
    """Promise 5: once a leader's transaction is committed, no earlier leader's is."""
    for name, records in simulation.broker.progress.items():
        ended: set[str] = set()
        last = ""
        for transaction in (each.transaction for each in records):
            if transaction is None or not transaction.committed or transaction.leader_id == last:
                continue
            leader_id = transaction.leader_id
            if leader_id in ended:
                yield f"leaders: {leader_id} of shard {name} came back"
            ended.add(last)
            last = leader_id


def _replaced(simulation: Simulation) -> Iterator[str]:
    """At least once: a leader that was replaced sends at most one more round, on which it had decided before."""
    rounds = Counter(
        leader_id
        for leader_id, at in simulation.broker.sends
        if at > simulation.database.replaced_at.get(leader_id, inf) + CONFIRM_SECONDS
    )
    for leader_id, count in rounds.items():
        if count > 1:
            yield f"replaced: {leader_id} sent {count} rounds after another had begun to lead"


def _sent_again(simulation: Simulation) -> Iterator[str]:
    """At least once: a leader does not send again what Kafka has acknowledged to it."""
    by_name = simulation.database.by_name
    for (leader_id, name), count in simulation.broker.acknowledged.items():
        if count > 1 and not by_name[name].restored:
            yield f"sent again: {name} was acknowledged {count} times to {leader_id}"


def _bad_rows(simulation: Simulation) -> Iterator[str]:
    """Promise 6: rows wait only behind a row that Kafka refuses, and only refused rows are dead letters."""
    database, refused = simulation.database, simulation.ever_refused
    for row in database.rows.values():
        of_topic = [event for event in database.events if event.topic == row.event.topic]
        if not any(each.topic in refused or (each.name in refused and each.key == row.event.key) for each in of_topic):
            yield f"bad rows: {row.event.name} ({row.event.key}) waits for nothing"
    for row in database.dead:
        if row.event.name not in refused and row.event.topic not in refused:
            yield f"bad rows: {row.event.name} is a dead letter, and was never refused"


def slowest(simulation: Simulation) -> float:
    """The longest time, in seconds, from a commit to the event's first appearance, since a leader was elected."""
    began: dict[str, float] = {}
    for records in simulation.broker.partitions.values():
        for each in records:
            if each.transaction is None or each.transaction.committed:
                began.setdefault(each.value, each.at)
    committed = {event.name: event.committed_at for event in simulation.database.events}
    return max(
        (at - committed[name] for name, at in began.items() if committed.get(name, 0.0) > ELECTED_SECONDS), default=0.0
    )
