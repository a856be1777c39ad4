"""How many rows are asked for at once: their values are in bounds, whatever comes."""

from __future__ import annotations

import pytest

from outbox_plugin.core.batch_size import BatchSize
from outbox_plugin.core.ports import ReadRequest
from outbox_plugin.core.row import Rows
from outbox_plugin.core.window import BYTES_PER_WINDOW, ROWS_PER_WINDOW


def rows(*sizes: int | None) -> Rows:
    return Rows([(n, 0, "t", "k", size and "x" * size, [], [], 1) for n, size in enumerate(sizes)])


@pytest.mark.parametrize("size", [0, 1, 200, 1_600, 20_000, 1_000_000, 3_000_000])
def test_a_portion_of_such_rows_is_in_bounds_and_no_smaller_than_it_need_be(size: int) -> None:
    batch_size = BatchSize()
    batch_size.update(rows(size, size, None, size, size, size))
    bytes_together = batch_size.rows * size * 5 // 6
    assert bytes_together <= BYTES_PER_WINDOW or batch_size.rows == 8
    assert batch_size.rows == ROWS_PER_WINDOW or bytes_together > 0.9 * BYTES_PER_WINDOW
    assert batch_size.rows * ReadRequest(batch_size.rows).large_bytes <= 2 * BYTES_PER_WINDOW


def test_it_grows_again_when_small_values_come() -> None:
    batch_size = BatchSize()
    batch_size.update(rows(3_000_000))
    batch_size.update(rows(*[200] * 1_000))
    assert batch_size.rows == ROWS_PER_WINDOW
