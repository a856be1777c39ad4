"""Rows of a read: tuples to those who handle many, and rows to those who look at one."""

from __future__ import annotations

from outbox_plugin.core.row import OutboxRow, Rows, column, fields_of

FIELDS = [(id_, 5, "t", f"k{id_}", None, ["h"], ["x"], 9) for id_ in (3, 1, 2)]
MADE = [OutboxRow(*fields) for fields in FIELDS]


def test_rows_are_made_when_they_are_looked_at() -> None:
    rows = Rows(FIELDS)
    assert (list(rows), rows[1], list(rows[1:]), len(rows)) == (MADE, MADE[1], MADE[1:], 3)
    assert isinstance(rows[1], OutboxRow)
    assert [row.key for row in rows.sorted()] == ["k1", "k2", "k3"]


def test_fields_and_columns_are_the_same_of_rows_that_are_made() -> None:
    for rows in (Rows(FIELDS), MADE):
        assert list(fields_of(rows)) == FIELDS
        assert list(column(rows, "key")) == ["k3", "k1", "k2"]
