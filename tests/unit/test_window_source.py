"""How many rows of a backlog are read at a time, beside live rows and without them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outbox_plugin.core.id_watermark import IdRange
from outbox_plugin.core.key_summary import HASH_BYTES, KeySummary
from outbox_plugin.core.poll_schedule import Read
from outbox_plugin.core.row import OutboxRow, Rows
from outbox_plugin.core.rows_beside_live import RowsBesideLive
from outbox_plugin.core.window import ROWS_PER_WINDOW, Windows
from outbox_plugin.relay.live_rows import LATELY_SECONDS, LiveRows, Summary
from outbox_plugin.relay.task_group import TaskGroup
from outbox_plugin.relay.window_source import WindowSource
from tests.clock import Clock

OF_BACKLOG, LIVE = Read(IdRange(0), is_sweep=False), Read(IdRange(1_000), is_sweep=False, is_live=True)


def test_a_backlog_is_read_in_large_parts_while_all_live_rows_wait_for_it() -> None:
    """Their keys are in the backlog: the sooner it ends, the sooner they go."""
    clock, keys = Clock(), KeySummary(1_000)
    keys.add((7).to_bytes(HASH_BYTES, "big"))
    rows = Rows([OutboxRow(1_000 + number, 0, "t", "k", "v", [], [], 0) for number in range(2)])
    hashes = [7, 7]
    store: Any = SimpleNamespace(read=lambda request: rows, key_hashes=lambda rows: hashes, snapshot=lambda: "")
    tasks = TaskGroup(clock, "test")
    live_rows = LiveRows(0, store, tasks, lambda event: None, lambda: None)
    source = WindowSource(store, Windows(), tasks.lock, live_rows, RowsBesideLive()).source()
    live_rows.begin(Summary(1_000, keys, 1_000, 0.0))
    live_rows.read(source.request(LIVE))
    assert source.request(OF_BACKLOG).limit == ROWS_PER_WINDOW
    hashes[1] = 8
    live_rows.read(source.request(LIVE))
    assert source.request(OF_BACKLOG).limit < ROWS_PER_WINDOW


def test_a_backlog_is_read_in_small_parts_only_while_live_rows_come() -> None:
    clock, found = Clock(), [OutboxRow(1_001, 0, "t", "k", "v", [], [], 0)]
    store: Any = SimpleNamespace(
        read=lambda request: Rows(list(found)), key_hashes=lambda rows: [7] * len(rows), snapshot=lambda: ""
    )
    tasks = TaskGroup(clock, "test")
    live_rows = LiveRows(0, store, tasks, lambda event: None, lambda: None)
    beside_live = RowsBesideLive()
    source = WindowSource(store, Windows(), tasks.lock, live_rows, beside_live).source()

    def limit(read: Read) -> int:
        return source.request(read).limit

    assert limit(OF_BACKLOG) == ROWS_PER_WINDOW
    live_rows.begin(Summary(1_000, KeySummary(1_000), 1_000, 0.0))
    assert limit(OF_BACKLOG) == ROWS_PER_WINDOW
    live_rows.read(source.request(LIVE))
    assert (limit(OF_BACKLOG), limit(LIVE)) == (beside_live.rows, ROWS_PER_WINDOW)
    clock.time = LATELY_SECONDS / 2
    found.clear()
    live_rows.read(source.request(LIVE))
    assert limit(OF_BACKLOG) == beside_live.rows
    clock.time = LATELY_SECONDS
    assert limit(OF_BACKLOG) == ROWS_PER_WINDOW
