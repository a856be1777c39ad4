"""The columns of a staging table, as far as they need no server."""

from __future__ import annotations

import pytest

from outbox_plugin.spark.columns import BusinessColumnWrong, RowForm
from outbox_plugin.spark.staging import new_staging_table


def test_more_business_columns_than_a_staging_table_holds_are_refused_in_one_line() -> None:
    most = tuple(f"c{n}" for n in range(1_598))  # Postgres allows 1,600, and two are the staging table's own.
    assert len(new_staging_table("outbox", RowForm(most), "wide", None).columns) == 1_600
    with pytest.raises(BusinessColumnWrong, match="the DataFrame has 1599 business columns; expected 1598 or fewer"):
        new_staging_table("outbox", RowForm((*most, "more")), "wide", None)
