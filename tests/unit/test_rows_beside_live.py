"""How many rows of a backlog go into a transaction while live rows come."""

from __future__ import annotations

import pytest

from outbox_plugin.core.rows_beside_live import MAX_ROWS, MIN_ROWS, RowsBesideLive


def measured(seconds: float) -> RowsBesideLive:
    """After many transactions that took so long."""
    beside = RowsBesideLive()
    for _ in range(200):
        beside.published(1, seconds)
    return beside


def test_until_it_is_measured_kafka_is_taken_to_be_near() -> None:
    assert RowsBesideLive().rows == 1_000


@pytest.mark.parametrize(
    ("seconds", "rows"),
    [(0.001, MIN_ROWS), (0.005, 1_000), (0.03, 6_000), (0.2, MAX_ROWS)],
    ids=["very near", "near", "far", "very far"],
)
def test_the_longer_a_transaction_takes_by_itself_the_more_rows_it_gets(seconds: float, rows: int) -> None:
    assert measured(seconds).rows == rows


def test_a_transaction_that_takes_long_once_changes_little() -> None:
    beside = measured(0.005)
    beside.published(1, 10.0)
    assert beside.rows == 1_100
    beside.published(1, 0.005)
    assert beside.rows == 1_000


@pytest.mark.parametrize("rows", [0, 5_000], ids=["all were refused", "many"])
def test_only_transactions_with_few_rows_show_the_time(rows: int) -> None:
    beside = measured(0.005)
    beside.published(rows, 0.001)
    assert beside.rows == 1_000


def test_the_first_measured_time_counts_as_it_is_and_the_second_shows_whether_it_was_a_hiccup() -> None:
    beside = RowsBesideLive()
    beside.measured(0.04)
    assert (beside.rows, beside.is_measured) == (8_000, False)
    beside.measured(0.03)
    assert (beside.rows, beside.is_measured) == (6_000, True)


def test_few_rows_show_the_time_as_well_as_none() -> None:
    assert measured(0.005).is_measured
