"""The limit of a read: the bytes of its rows stay in bounds, whatever their size."""

from __future__ import annotations

import pytest

from outbox_plugin.core.adaptive_read_limit import AdaptiveReadLimit
from outbox_plugin.core.postgres_ports import ReadRequest
from outbox_plugin.core.row import Rows
from outbox_plugin.core.window import BYTES_PER_WINDOW, ROWS_PER_WINDOW


def rows(*sizes: int | None) -> Rows:
    return Rows([(n, 0, "t", "k", size and "x" * size, [], [], 1) for n, size in enumerate(sizes)])


@pytest.mark.parametrize("size", [0, 1, 200, 1_600, 20_000, 1_000_000, 3_000_000])
def test_a_read_of_such_rows_is_in_bounds_and_no_smaller_than_it_need_be(size: int) -> None:
    read_limit = AdaptiveReadLimit()
    read_limit.update(rows(size, size, None, size, size, size))
    bytes_together = read_limit.rows * size * 5 // 6
    assert bytes_together <= BYTES_PER_WINDOW or read_limit.rows == 8
    assert read_limit.rows == ROWS_PER_WINDOW or bytes_together > 0.9 * BYTES_PER_WINDOW
    assert read_limit.rows * ReadRequest(read_limit.rows).large_bytes <= 2 * BYTES_PER_WINDOW


def test_it_grows_again_when_small_values_come() -> None:
    read_limit = AdaptiveReadLimit()
    read_limit.update(rows(3_000_000))
    read_limit.update(rows(*[200] * 1_000))
    assert read_limit.rows == ROWS_PER_WINDOW
