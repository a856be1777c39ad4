"""The columns of a staging table, as far as they need no server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from outbox_plugin.spark.columns import BusinessColumnWrong, RowForm
from outbox_plugin.spark.row_problems import RowProblem
from outbox_plugin.spark.staging import StageTask, new_staging_table


def test_more_business_columns_than_a_staging_table_holds_are_refused_in_one_line() -> None:
    most = tuple(f"c{n}" for n in range(1_598))  # Postgres allows 1,600, and two are the staging table's own.
    assert len(new_staging_table("outbox", RowForm(most), "wide", None).columns) == 1_600
    with pytest.raises(BusinessColumnWrong, match="the DataFrame has 1599 business columns; expected 1598 or fewer"):
        new_staging_table("outbox", RowForm((*most, "more")), "wide", None)


@pytest.mark.parametrize(
    ("context", "refused"),
    [
        ('COPY outbox_staging_ab, line 3, column row_1: "x"', RowProblem("b", 'too long: "x"')),
        ("COPY outbox_staging_ab, line 3, column row_1", RowProblem("b", "too long")),
        ("COPY outbox_staging_ab, Zeile 3, Spalte row_1: »x«", RowProblem("b", "too long: »x«")),
        ('outbox_staging_abのCOPY、行 1、列 row_1: "x"', RowProblem("b", 'too long: "x"')),
        ('outbox_staging_ab 복사, 1번째 줄, row_1 열: "x"', RowProblem("b", 'too long 열: "x"')),
        ("SQL function f\nCOPY outbox_staging_ab, line 3, column row_1", RowProblem("b", "too long")),
        ('COPY outbox_staging_ab, line 3, column kafka_value: "row_7 is bad"', None),
        ('COPY outbox_staging_ab, line 3, column kafka_value: "column row_1 is bad"', None),
        ('COPY outbox_staging_ab, line 3: "1,row_1"', None),
    ],
)
def test_the_business_column_that_postgres_refuses_is_not_sought_in_values(
    context: str, refused: RowProblem | None
) -> None:
    task = StageTask("", new_staging_table("outbox", RowForm(("a", "b")), "wide", None))
    error = SimpleNamespace(diag=SimpleNamespace(context=context, message_primary="too long"))
    assert task._problem_of(cast(Any, error)) == refused
