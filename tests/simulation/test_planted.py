"""The simulation can fail: each bug that is planted here is found, and soon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest

from outbox_plugin.core.id_watermark import IdRange, IdWatermark
from outbox_plugin.core.key_summary import HASH_BYTES, KeySummary
from outbox_plugin.core.last_progress import LastProgress, LastRecordFinder, LogRecord
from outbox_plugin.core.progress import ProgressRecord, Publication
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Slice
from outbox_plugin.core.signing import Signer
from outbox_plugin.core.window import Window
from outbox_plugin.core.window_queue import QueuedWindow, WindowQueue
from outbox_plugin.relay import at_least_once, exactly_once
from outbox_plugin.relay.at_least_once import AtLeastOnce
from outbox_plugin.relay.exactly_once import ExactlyOnce
from tests.simulation import postgres
from tests.simulation.conftest import SCHEDULES, Seeds
from tests.simulation.kafka import SimulatedLog
from tests.simulation.plan import (
    BAD_TOPIC,
    BATCH,
    DELETE,
    HALT,
    HOSTILE,
    NO_LEADER,
    OTHER_DELIVERY,
    OTHER_GROUP,
    PAUSE,
    RESHARD,
    REWRITE,
    TRUNCATE,
    WRAP,
    Fault,
    Plan,
)
from tests.simulation.postgres import Database, Row, Service, Store
from tests.simulation.schedule import run

Plant = Callable[[pytest.MonkeyPatch], None]


def skip_the_fence(patch: pytest.MonkeyPatch) -> None:
    fence = SimulatedLog.fence

    def with_an_id_of_its_own(log: SimulatedLog, _generation: int) -> None:
        fence(log, log._process.scheduler.rng.randrange(1, 2**30))

    patch.setattr(SimulatedLog, "fence", with_an_id_of_its_own)


def delete_before_commit(patch: pytest.MonkeyPatch) -> None:
    publish = ExactlyOnce._publish

    def too_early(term: ExactlyOnce, window: Window, read_at: float) -> None:
        term._store.purge(window.publications)
        publish(term, window, read_at)

    patch.setattr(ExactlyOnce, "_publish", too_early)


def forget_the_ids_in_flight_at_takeover(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(exactly_once, "left_behind", lambda *_, **__: ())


def delete_by_id_alone(patch: pytest.MonkeyPatch) -> None:
    def by_id(store: Store, publication: Publication) -> list[Row]:
        return [row for row in store.database.rows.values() if row.id in publication.ids]

    patch.setattr(Store, "visible_to_the_read", by_id)
    patch.setattr(Store, "proven_by_times", by_id)


def drop_the_barrier(patch: pytest.MonkeyPatch) -> None:
    def all_at_once(rows: Sequence[OutboxRow]) -> list[list[OutboxRow]]:
        return [list(rows)]

    patch.setattr(at_least_once, "rounds", all_at_once)


def put_aside_without_leading(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "_check_leads", lambda _: None)


def mark_without_leading(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "_leads", lambda _: True)


def send_what_was_marked_long_ago(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AtLeastOnce, "_confirm", lambda _: None)


def go_on_with_a_producer_in_doubt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedLog, "in_doubt", False)


def replace_a_producer_without_asking_who_leads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExactlyOnce, "_replace_producer", lambda term: term._log.fence(term._generation))


def leave_no_record_for_shards_of_before(patch: pytest.MonkeyPatch) -> None:
    former = SimulatedLog.former

    def silent(log: SimulatedLog, slice_: Slice) -> SimulatedLog:
        opened = former(log, slice_)
        patch.setattr(opened, "publish", lambda *_: True)
        return opened

    patch.setattr(SimulatedLog, "former", silent)
    patch.setattr(Store, "check_leads", lambda _: None)  # Which would notice it, too.


def read_before_the_layout_is_settled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExactlyOnce, "_wait_for_settled_layout", lambda _: True)


def believe_who_has_not_signed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Signer, "verifies", lambda *_: True)


def take_copies_for_originals(patch: pytest.MonkeyPatch) -> None:
    def conclude(
        finder: LastRecordFinder, records: Sequence[LogRecord], start: int, first: int, end: int
    ) -> LastProgress:
        signed = [(ProgressRecord.parse(each.value or b""), each) for each in records if finder._verifies(each)]
        committed = [record for record, each in signed if each.is_committed]
        newest = max((record for record, _ in signed), key=lambda each: each.number, default=None)
        return LastProgress(committed[-1] if committed else None, newest, end)

    patch.setattr(LastRecordFinder, "conclude", conclude)


def let_a_new_leader_raise_the_generation(patch: pytest.MonkeyPatch) -> None:
    fence = ExactlyOnce._fence

    def as_if_it_had_fenced(term: ExactlyOnce, *, has_fenced: bool) -> None:
        fence(term, has_fenced=True)

    patch.setattr(ExactlyOnce, "_fence", as_if_it_had_fenced)


def forget_the_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "generation", lambda *_: 0)


# A partition has no leader while leaders are stopped, in the middle of a commit too.
LEADERLESS = Plan(
    harvesters=2,
    writers=4,
    writing=8.0,
    mishap_rate=0.3,
    mishaps=("paused before the answer", "paused before it was sent"),
    aims=("commits", "fences", "adds", "raises", "begins"),
    latency=0.02,
    longest_pause=5.0,
    faults=tuple(Fault(NO_LEADER, at, 3.0, 2) for at in (0.7, 4.7)),
)

# The number of shards changes while leaders are stopped for so long that others take over before they go on.
LATE_RESHARDING = Plan(
    harvesters=3,
    writers=4,
    writing=8.0,
    keys=2,
    mishap_rate=0.3,
    mishaps=("paused before the answer", "paused before it was sent", "repeated"),
    aims=("commits", "reads", "fences"),
    latency=0.02,
    longest_pause=5.0,
    faults=tuple(Fault(RESHARD, at, 0.0, shards) for at, shards in ((2.0, 2), (4.0, 1), (6.0, 3))),
)

# Connections to Kafka that break under a commit, and a slow way, so that the next transaction is open for long.
LATE_COMMITS = Plan(
    harvesters=2,
    writers=4,
    writing=8.0,
    mishap_rate=0.5,
    mishaps=("repeated",),
    aims=("commits",),
    latency=0.1,
)

# Leaders that are stopped for so long after a commit that another one takes over before they go on.
LATE_RETURNS = Plan(
    harvesters=2,
    writers=4,
    writing=8.0,
    mishap_rate=0.3,
    mishaps=("paused before the answer",),
    aims=("commits", "reads"),
    latency=0.02,
)


def prove_rows_by_transaction_ids_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "proven_by_times", Store.visible_to_the_read)


def believe_old_transaction_ids_to_be_new(patch: pytest.MonkeyPatch) -> None:
    prove_rows_by_transaction_ids_alone(patch)


def send_what_has_vanished_as_a_tombstone(patch: pytest.MonkeyPatch) -> None:
    def with_large_values(store: Store, rows: list[OutboxRow]) -> list[OutboxRow]:
        large = [row for row in rows if store._is_large(row)]
        values = store.large_values(large)
        return [row._replace(value=values.get(row.id)) if row in large else row for row in rows]

    patch.setattr(Store, "with_large_values", with_large_values)


def do_not_notice_a_truncation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Database, "_new_incarnation", lambda database: database.incarnation)


# Two leaders are stopped at the wrong moments while a topic comes and goes: a zombie dead-letters published rows.
LATE_DEAD_LETTERS = Plan(
    harvesters=2,
    writers=3,
    keys=2,
    mishap_rate=0.3,
    mishaps=("paused before it was sent",),
    aims=("dead_letters", "purges"),
    bad_rows="dead-letter",
    faults=tuple(Fault(BAD_TOPIC, at, 1.5, 1) for at in (1.0, 3.0, 5.0)),
)


# Migrations that rewrite the table under load.
REWRITES = Plan(
    harvesters=2, writers=3, latency=0.02, faults=tuple(Fault(REWRITE, 0.5 + at / 2, 0.0, 1) for at in range(10))
)
# Rows that wait while 2^31 transactions pass.
OLD_ROWS = Plan(harvesters=2, writers=3, faults=(Fault(HALT, 1.0, 4.0, 1), Fault(WRAP, 4.0, 0.0, 1)))
# Large rows that somebody deletes while they are read.
VANISHING = Plan(
    harvesters=2,
    writers=4,
    latency=0.1,
    large=0.5,
    faults=tuple(Fault(DELETE, 0.5 + at / 4, 0.0, 1) for at in range(20)),
)
# Rows that are all created at one time, whose ids are given again while a leader is dead.
TRUNCATED = Plan(
    harvesters=2,
    writers=4,
    create_times="the same",
    mishap_rate=0.2,
    mishaps=("killed before it was sent", "killed before the answer"),
    aims=("commits", "purges"),
    faults=tuple(Fault(TRUNCATE, 1.0 + at, 0.0, 1) for at in range(5)),
)


# The number of shards changes while leaders mark rows, which takes long.
SLOW_MARKS = Plan(
    delivery="at-least-once",
    harvesters=3,
    shards=2,
    writers=4,
    writing=8.0,
    keys=4,
    latency=0.02,
    slow_marks=0.5,
    faults=tuple(Fault(RESHARD, at, 0.0, shards) for at, shards in ((2.0, 3), (3.0, 1), (4.0, 2), (5.0, 3), (6.0, 1))),
)


def believe_that_an_empty_mark_found_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "has_unmarked", lambda *_: False)


def change_the_layout_while_leaders_mark(patch: pytest.MonkeyPatch) -> None:
    change = Database.change_layout

    def without_waiting(database: Database, shards: int) -> None:
        with pytest.MonkeyPatch.context() as change_only:
            change_only.setattr(Database, "end_marks", lambda *_: None)
            change(database, shards)

    patch.setattr(Database, "change_layout", without_waiting)


# Leaders that are paused while another group, or the other delivery, adopts the outbox, and that go on after it.
ADOPTIONS = Plan(
    harvesters=3,
    writers=4,
    writing=8.0,
    keys=2,
    faults=tuple(
        Fault(kind, at, seconds, target)
        for at, kind, seconds, target in (
            (0.9, PAUSE, 2.0, 0),
            (1.0, PAUSE, 3.0, 1),
            (1.2, OTHER_GROUP, 0.5, 0),
            (3.9, PAUSE, 2.0, 2),
            (4.0, PAUSE, 3.0, 1),
            (4.2, OTHER_DELIVERY, 0.5, 0),
            (6.2, OTHER_DELIVERY, 0.5, 0),
        )
    ),
)


def let_leaders_read_on_after_an_adoption(patch: pytest.MonkeyPatch) -> None:
    adopt = Database.adopt

    def without_another_layout(database: Database, service: Service) -> None:
        number = database.layout.number
        adopt(database, service)
        database.layout = replace(database.layout, number=number)

    patch.setattr(Database, "adopt", without_another_layout)


# A leader that is paused while another group adopts the outbox, and goes on long before the last event is written: what
# was written before an adoption may be repeated.
ONE_ADOPTION = Plan(
    harvesters=3,
    writers=4,
    writing=8.0,
    keys=2,
    faults=(Fault(PAUSE, 2.4, 2.0, 2), Fault(PAUSE, 2.5, 3.0, 1), Fault(OTHER_GROUP, 2.7, 0.5, 0)),
)

# Leaders that are killed before they purge, and an attacker who writes to the control topics all the time.
NEIGHBOUR = Plan(
    harvesters=2,
    writers=4,
    mishap_rate=0.2,
    mishaps=("killed before it was sent", "killed before the answer"),
    aims=("commits", "purges"),
    faults=(Fault(HOSTILE, 0.5, 10.0, 1),),
)


def forget_keys(patch: pytest.MonkeyPatch) -> None:
    add = KeySummary.add
    patch.setattr(KeySummary, "add", lambda summary, hashes: add(summary, hashes[HASH_BYTES:]))


def take_any_id_for_a_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IdWatermark, "settled", property(lambda watermark: watermark.last_drawn))


def read_live_rows_past_those_that_are_not_visible_yet(patch: pytest.MonkeyPatch) -> None:
    def live_read_ended(watermark: IdWatermark, last_id: int | None, now: float) -> None:
        watermark._live_watermark = max(watermark._live_watermark, last_id or 0)

    patch.setattr(IdWatermark, "live_read_ended", live_read_ended)


# Large transactions among small ones, and a way to Kafka that is slower than the one to Postgres.
def publish_live_rows_between_the_parts_of_a_window(patch: pytest.MonkeyPatch) -> None:
    def put_back(queue: WindowQueue, part: QueuedWindow) -> None:
        queue._others.appendleft(part)

    patch.setattr(WindowQueue, "put_back", put_back)


def pass_over_ids_that_no_read_went_through(patch: pytest.MonkeyPatch) -> None:
    leave = IdWatermark._leave_to_open_writers

    def leave_all(watermark: IdWatermark, above: int, last_id: int | None, now: float) -> None:
        leave(watermark, above, None, now)

    patch.setattr(IdWatermark, "_leave_to_open_writers", leave_all)


def pass_over_the_ids_of_writers_that_have_ended(patch: pytest.MonkeyPatch) -> None:
    def is_in(id_: int, ids: IdRange, open_transactions: object) -> bool:
        above = ids.above if ids.open_writers is None else ids.open_writers.up_to
        return id_ > above and (ids.up_to is None or id_ <= ids.up_to)

    patch.setattr(postgres, "is_in", is_in)


BATCHES = Plan(
    harvesters=2,
    writers=6,
    transactions=20,
    writing=4.0,
    keys=6,
    latency=0.004,
    kafka_latency=0.04,
    faults=tuple(Fault(BATCH, 0.6 + at, 1.0, 1) for at in range(3)),
)


class Found(NamedTuple):
    """The promises that a bug breaks, and the schedules where it is looked for.

    These are of a plan, or any if there is none. A bug that few schedules find is looked for from `first_seed` on.
    """

    broken: tuple[str, ...]
    plan: Plan | None = None
    first_seed: int = 0


PLANTS: dict[Plant, Found] = {
    skip_the_fence: Found(("repeated", "leaders", "order", "late")),
    delete_before_commit: Found(("loss",)),
    forget_the_ids_in_flight_at_takeover: Found(("repeated",)),
    delete_by_id_alone: Found(("loss",)),
    drop_the_barrier: Found(("order",)),
    mark_without_leading: Found(("replaced", "sent again")),
    send_what_was_marked_long_ago: Found(("replaced",)),
    put_aside_without_leading: Found(("repeated",), LATE_DEAD_LETTERS),
    prove_rows_by_transaction_ids_alone: Found(("repeated",), REWRITES),
    believe_old_transaction_ids_to_be_new: Found(("repeated", "loss"), OLD_ROWS),
    send_what_has_vanished_as_a_tombstone: Found(("phantom",), VANISHING),
    do_not_notice_a_truncation: Found(("loss",), TRUNCATED),
    go_on_with_a_producer_in_doubt: Found(("loss", "repeated"), LATE_COMMITS),
    replace_a_producer_without_asking_who_leads: Found(("repeated", "leaders"), LATE_RETURNS),
    let_a_new_leader_raise_the_generation: Found(("repeated", "leaders"), LEADERLESS),
    forget_the_generation: Found(("repeated", "leaders"), LEADERLESS),
    believe_who_has_not_signed: Found(("loss",), NEIGHBOUR),
    take_copies_for_originals: Found(("loss", "repeated"), NEIGHBOUR),
    leave_no_record_for_shards_of_before: Found(("repeated",), LATE_RESHARDING),
    read_before_the_layout_is_settled: Found(("repeated",), LATE_RESHARDING),
    change_the_layout_while_leaders_mark: Found(("sent again",), SLOW_MARKS),
    believe_that_an_empty_mark_found_nothing: Found(("order",), SLOW_MARKS, first_seed=650),
    let_leaders_read_on_after_an_adoption: Found(("repeated", "order"), ONE_ADOPTION),
    forget_keys: Found(("order",), BATCHES),
    take_any_id_for_a_bound: Found(("order",), BATCHES),
    read_live_rows_past_those_that_are_not_visible_yet: Found(("order",), BATCHES),
    publish_live_rows_between_the_parts_of_a_window: Found(("order",), BATCHES),
    pass_over_ids_that_no_read_went_through: Found(("order", "loss"), BATCHES),
    pass_over_the_ids_of_writers_that_have_ended: Found(("order",), BATCHES),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    expected = PLANTS[plant]
    for seed in range(expected.first_seed, expected.first_seed + SCHEDULES):
        if broken := run(seed, plan=expected.plan).broken:
            break
    else:
        pytest.fail(f"not found in {SCHEDULES} schedules")
    print(f"found by seed {seed}: {broken[0]}")
    assert any(one.split(":")[0] in expected.broken for one in broken)


RARE = {
    "dead letters": LATE_DEAD_LETTERS,
    "commits": LATE_COMMITS,
    "returns": LATE_RETURNS,
    "resharding": LATE_RESHARDING,
    "resharding at least once": SLOW_MARKS,
    "adoption": ONE_ADOPTION,
    "adoptions": ADOPTIONS,
    "leaderless": LEADERLESS,
}


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("plan", RARE.values(), ids=RARE.keys())
def test_where_a_rare_bug_is_looked_for_there_is_none(plan: Plan, seeds: Seeds) -> None:
    for seed in seeds(SCHEDULES // 4):
        assert not run(seed, plan=plan).broken, f"seed {seed}"


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("plan", [REWRITES, OLD_ROWS, VANISHING, TRUNCATED], ids=lambda plan: plan.faults[-1].kind)
def test_where_bugs_of_rows_are_looked_for_there_is_none(plan: Plan, seeds: Seeds) -> None:
    for seed in seeds(SCHEDULES // 16):
        assert not run(seed, plan=plan).broken, f"seed {seed}"


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_live_rows_keep_the_order_of_each_key_beside_batches(seeds: Seeds) -> None:
    for seed in seeds(SCHEDULES // 64):
        assert not run(seed, plan=BATCHES).broken, f"seed {seed}"
