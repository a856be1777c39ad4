"""Live windows go with those of a backlog where they go before it; all windows stand in one line otherwise."""

from __future__ import annotations

from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.window import BYTES_PER_WINDOW, ROWS_PER_WINDOW, Window
from outbox_plugin.core.window_queue import QueuedWindow, WindowQueue


def queued(id_: int, rows: int = 1, value: str = "v") -> QueuedWindow:
    return QueuedWindow(Window([OutboxRow(id_ + more, 0, "t", "k", value, [], [], 0) for more in range(rows)]), 0.0)


def queue_of(*, live: list[int], others: list[int]) -> WindowQueue:
    queue = WindowQueue()
    for id_ in live:
        queue.put(queued(id_), is_live=True)
    for id_ in others:
        queue.put(queued(id_), is_live=False)
    return queue


def taken(queue: WindowQueue) -> list[list[int]]:
    """The first ids of all windows that are taken, each time."""
    ids = []
    while windows := queue.take():
        ids.append([each.window.rows[0].id for each in windows])
    return ids


def test_all_live_windows_go_with_the_next_one_of_the_others() -> None:
    assert taken(queue_of(live=[11, 12, 13], others=[1, 2])) == [[1, 11, 12, 13], [2]]


def test_each_line_goes_on_alone() -> None:
    assert taken(queue_of(live=[11, 12], others=[])) == [[11, 12]]
    assert taken(queue_of(live=[], others=[1, 2])) == [[1], [2]]


def test_large_live_windows_take_turns_and_do_not_starve() -> None:
    queue = WindowQueue()
    for id_ in (1, 2):
        queue.put(queued(id_, ROWS_PER_WINDOW), is_live=False)
    for id_ in (100_000, 200_000):
        queue.put(queued(id_, ROWS_PER_WINDOW), is_live=True)
    assert taken(queue) == [[1, 100_000], [2, 200_000]]


def test_what_is_read_after_a_join_passes_no_live_window() -> None:
    queue = queue_of(live=[11], others=[])
    assert taken(queue) == [[11]]
    queue.put(queued(12), is_live=True)
    queue.join()
    queue.put(queued(13), is_live=False)
    assert not queue.has_live
    assert queue.has_others
    assert taken(queue) == [[12], [13]]


def test_live_windows_go_first_when_the_backlog_becomes_another_one() -> None:
    """Rows that are read from now on may have their keys."""
    queue = queue_of(live=[11, 12], others=[1, 2])
    queue.join()
    queue.put(queued(13), is_live=True)
    assert taken(queue) == [[11], [12], [1, 13], [2]]


def test_the_parts_of_a_window_go_before_all_others_and_alone() -> None:
    queue = queue_of(live=[], others=[1, 2])
    queue.take()
    queue.put_back(queued(21))
    queue.put_back(queued(11))  # The first half was still too large.
    queue.put(queued(22), is_live=True)
    assert taken(queue) == [[11], [21], [2, 22]]


def test_live_rows_are_enough_when_they_have_a_windows_bytes() -> None:
    queue, is_full = WindowQueue(), list[bool]()
    queue.put(queued(1, value="x" * (BYTES_PER_WINDOW - 10)), is_live=True)
    queue.put(queued(2, value="x" * BYTES_PER_WINDOW), is_live=False)
    is_full.append(queue.live_is_full)
    queue.put(queued(3, value="x" * 10), is_live=True)
    is_full.append(queue.live_is_full)
    queue.take()
    is_full.append(queue.live_is_full)
    assert is_full == [False, True, False]


def test_a_transaction_has_rows_of_few_reads() -> None:
    queue = queue_of(live=[*range(1, 200)], others=[])
    assert [len(each) for each in taken(queue)] == [64, 64, 64, 7]
