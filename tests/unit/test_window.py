"""Windows in flight, and the progress record that names them."""

from __future__ import annotations

import pytest

from outbox_plugin.core.id_ranges import IdRanges
from outbox_plugin.core.progress import (
    LATEST_TIME,
    WIDE_GAP,
    MalformedProgress,
    OutboxIdentity,
    ProgressRecord,
    Publication,
    publications_of,
)
from outbox_plugin.core.recovery import left_behind
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.window import ROWS_IN_FLIGHT, ROWS_PER_WINDOW, UNPURGED_WINDOWS, Window, Windows
from outbox_plugin.errors import ForeignOutbox

NOON = 820_497_600_000_000  # Microseconds since 2000: noon of 2025-12-31.
OURS = OutboxIdentity("incarnation-1", "outbox in database shop of cluster 1")


def rows(*ids: int, horizon: int = 700) -> list[OutboxRow]:
    return [OutboxRow(each, NOON - each, "t", "k", "v", [], [], horizon) for each in ids]


def admitted(windows: Windows, *ids: int) -> Window:
    window = windows.admit(rows(*ids))
    assert window is not None
    return window


def record(*publications: Publication, identity: OutboxIdentity = OURS) -> ProgressRecord:
    return ProgressRecord(identity, "leader-1", sum(len(each.ids) for each in publications), publications)


def test_what_is_read_is_in_flight_until_it_is_purged() -> None:
    windows = Windows()
    first, second = admitted(windows, 1, 2), admitted(windows, 5)
    assert list(windows.in_flight) == [1, 2, 5]
    windows.mark_published(first)
    windows.mark_published(second)
    assert list(windows.in_flight) == [1, 2, 5]
    windows.mark_purged([first])
    assert list(windows.in_flight) == [5]
    windows.mark_purged([second])
    assert windows.in_flight == IdRanges()


def test_a_progress_record_names_the_window_and_all_that_may_not_be_deleted_yet() -> None:
    windows = Windows()
    first, second, third = admitted(windows, 1), admitted(windows, 2), admitted(windows, 3)
    assert windows.publications_with(first) == first.publications
    windows.mark_published(first)
    assert windows.publications_with(second) == (*first.publications, *second.publications)
    windows.mark_published(second)
    windows.mark_purged([first])
    assert windows.unpurged == second.publications
    assert windows.publications_with(third) == (*second.publications, *third.publications)


def test_windows_are_published_in_the_order_in_which_they_were_read() -> None:
    windows = Windows()
    admitted(windows, 1)
    second = admitted(windows, 2)
    with pytest.raises(ValueError, match="to be published before"):
        windows.publications_with(second)
    with pytest.raises(ValueError, match="to be published before"):
        windows.mark_published(second)
    assert list(windows.in_flight) == [1, 2]


def test_windows_that_are_published_together_become_one_and_what_proves_their_rows_does_not_change() -> None:
    windows = Windows()
    first, second, third = (windows.admit(rows(*ids, horizon=700 + ids[0])) for ids in [(1, 2), (5,), (8, 9)])
    assert first
    assert second
    assert third
    first_proof, third_proof = first.publications, third.publications
    merged = windows.publish_next([first, third])
    assert [row.id for row in merged.rows] == [1, 2, 8, 9]
    assert merged.publications == (*first_proof, *third_proof)
    assert windows.publications_with(merged) == merged.publications
    windows.mark_published(merged)
    assert windows.publish_next([second]) is second
    assert list(windows.in_flight) == [1, 2, 5, 8, 9]


def test_reads_whose_rows_have_ids_between_each_other_have_a_publication_each() -> None:
    """As where writers draw ids at the same time, and commit in another order."""
    mixed = [*rows(1, horizon=700), *rows(2, horizon=701), *rows(3, horizon=700), *rows(4, horizon=701)]
    assert publications_of(mixed) == (
        Publication.of(rows(1, 3, horizon=700)),
        Publication.of(rows(2, 4, horizon=701)),
    )


def test_rows_that_are_far_apart_are_purged_by_themselves() -> None:
    """A purge walks all rows between its first and its last id, perhaps millions of a backlog."""
    far = 3 + WIDE_GAP
    assert publications_of(rows(1, 2, far)) == (Publication.of(rows(1, 2)), Publication.of(rows(far)))
    assert publications_of(rows(1, 2, far - 1)) == (Publication.of(rows(1, 2, far - 1)),)
    assert publications_of(()) == ()


def test_rows_that_are_all_far_apart_are_purged_together_but_for_the_widest_gaps() -> None:
    """Ids may be made of times, and each purge is a statement."""
    ids = [number * 2 * WIDE_GAP for number in range(1_000)]
    wider = [*ids, ids[-1] + 3 * WIDE_GAP]
    published = publications_of(rows(*wider))
    assert len(published) < 10
    assert published[-1] == Publication.of(rows(wider[-1]))
    assert [id_ for each in published for id_ in each.ids] == wider


@pytest.mark.parametrize(
    ("size", "count"), [(1, UNPURGED_WINDOWS), (ROWS_PER_WINDOW, ROWS_IN_FLIGHT // ROWS_PER_WINDOW)]
)
def test_reading_on_waits_for_a_purge(size: int, count: int) -> None:
    windows = Windows()
    each = [admitted(windows, *range(number * size, (number + 1) * size)) for number in range(count)]
    for window in each[:-1]:
        windows.mark_published(window)
    windows.mark_published(each[-1])
    assert windows.full
    windows.mark_purged(each[:1])
    assert not windows.full


def test_a_published_window_gives_its_rows_back() -> None:
    windows = Windows()
    window = admitted(windows, 1, 2)
    windows.mark_published(window)
    assert (window.rows, window.size) == ((), 2)


def test_a_publication_is_bounded_by_what_its_read_could_see() -> None:
    publication = Publication.of(rows(3, 4, 9, horizon=815))
    assert publication == Publication(IdRanges.of([3, 4, 9]), 815, NOON - 3, NOON - 9, publication.created)
    assert publication.times == [NOON - 3, NOON - 4, NOON - 9]


INFINITE = 2**63 - 1


@pytest.mark.parametrize(
    "times",
    [
        [NOON],
        [NOON, NOON],
        [NOON, NOON + 1],
        [NOON, NOON - 255, NOON],
        [NOON + 256, NOON],
        [NOON + 65_535, NOON, NOON + 65_534],
        [NOON, -NOON, 0, 1, -1],
        [NOON, INFINITE, -INFINITE - 1],
        [INFINITE, INFINITE],
        [LATEST_TIME, -LATEST_TIME],
        [NOON + each * each * 7_919 for each in range(3_000)],
    ],
)
def test_creation_times_survive_their_wire_form(times: list[int]) -> None:
    read = [row._replace(create_time=time) for row, time in zip(rows(*range(len(times))), times, strict=True)]
    written = record(Publication.of(read))
    [publication] = ProgressRecord.parse(written.encode()).publications
    assert publication.times == times


def test_rows_that_share_a_creation_time_need_none_each() -> None:
    read = [row._replace(create_time=NOON) for row in rows(*range(1_000))]
    assert Publication.of(read).created is None
    assert len(record(Publication.of(read)).encode()) < 300


def test_the_creation_times_of_an_earlier_version_are_not_known() -> None:
    assert Publication(IdRanges.of([3, 4]), 815, NOON, NOON - 9).times is None


def test_a_record_that_brokers_would_refuse_leaves_creation_times_out() -> None:
    read = [
        row._replace(create_time=NOON + each * each)
        for each, row in enumerate(rows(*range(10**7, 10**7 + 2 * ROWS_PER_WINDOW, 2)))
    ]
    written = record(*[Publication.of(read)] * 4)
    parsed = ProgressRecord.parse(written.encode())
    assert len(written.encode()) < 1_000_000
    assert [each.times for each in parsed.publications] == [None] * 4
    assert [each.ids for each in parsed.publications] == [each.ids for each in written.publications]


@pytest.mark.parametrize("created", ["7", '"AA"', '"="', '"Zm9vYmE="', '""', "[]", '"é"'])
def test_creation_times_that_are_none_are_not_guessed_at(created: str) -> None:
    written = record(Publication.of(rows(3, 4))).encode().decode()
    [right] = [each.created for each in ProgressRecord.parse(written.encode()).publications]
    with pytest.raises(MalformedProgress):
        ProgressRecord.parse(written.replace(f'"{right}"', created).encode())


def test_a_publication_of_more_rows_than_there_can_be_is_not_guessed_at() -> None:
    written = record(Publication(IdRanges(((0, 2**62),)), 700, NOON, NOON)).encode()
    with pytest.raises(MalformedProgress):
        ProgressRecord.parse(written)


def test_a_creation_time_beyond_exact_arithmetic_bounds_nothing() -> None:
    infinite = rows(3)[0]._replace(create_time=2**63 - 1)
    assert Publication.of([infinite]).created_until is None


def test_a_progress_record_survives_its_wire_form() -> None:
    written = record(Publication.of(rows(3, 4, 9)), Publication.of(rows(11)))
    assert ProgressRecord.parse(written.encode()) == written


def test_a_progress_record_of_the_first_version_is_understood() -> None:
    written = record(Publication(IdRanges.of([3]), 700, NOON + 354_548)).encode()
    first = written.replace(str(NOON + 354_548).encode(), b'"2025-12-31T12:00:00.354548+00:00"')
    first = first.replace(b',"created_from":null', b"")
    assert first != written
    assert ProgressRecord.parse(first) == ProgressRecord.parse(written)


@pytest.mark.parametrize("created", [b'"noon"', b"[]", b"{}"])
def test_a_time_that_is_none_is_not_guessed_at(created: bytes) -> None:
    written = record(Publication(IdRanges.of([3]), 700, NOON)).encode()
    with pytest.raises(MalformedProgress):
        ProgressRecord.parse(written.replace(str(NOON).encode(), created))


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff", b'{"version":2}', b'{"version":1}'])
def test_what_is_no_progress_record_is_not_guessed_at(body: bytes) -> None:
    with pytest.raises(MalformedProgress, match="progress record"):
        ProgressRecord.parse(body)


def test_a_new_leader_deletes_what_the_last_one_published() -> None:
    publication = Publication.of(rows(1, 2))
    assert left_behind(record(publication), OURS) == (publication,)
    assert left_behind(None, OURS) == ()


def test_the_record_of_a_dropped_table_deletes_nothing() -> None:
    old = OutboxIdentity("incarnation-0", OURS.place)
    assert left_behind(record(Publication.of(rows(1)), identity=old), OURS) == ()


def test_the_record_of_another_outbox_is_refused_unless_adopted() -> None:
    other = record(Publication.of(rows(1)), identity=OutboxIdentity("incarnation-9", "elsewhere"))
    with pytest.raises(ForeignOutbox, match=r"elsewhere, not outbox in database shop.*OUTBOX_GROUP"):
        left_behind(other, OURS)
    assert left_behind(other, OURS, adopt=True) == ()
