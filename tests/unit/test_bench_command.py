"""How a benchmark ends that cannot go on."""

from __future__ import annotations

import click
import psycopg
import pytest

from outbox_plugin.bench.command import Benchmarks
from outbox_plugin.errors import StoreUnavailable


def ran(error: Exception) -> None:
    """Run a benchmark that ends with `error`."""

    def fail() -> None:
        raise error

    Benchmarks(commands={"fail": click.Command("fail", callback=fail)}).main(["fail"], standalone_mode=False)


@pytest.mark.parametrize(
    "error",
    [
        psycopg.errors.AdminShutdown("terminating connection due to administrator command"),
        psycopg.OperationalError("server closed the connection unexpectedly"),
    ],
)
def test_a_benchmark_whose_postgres_goes_away_says_so(error: psycopg.Error) -> None:
    with pytest.raises(StoreUnavailable, match=f"^Postgres, as OUTBOX_DSN names it, went away: {error}$") as ended:
        ran(error)
    assert ended.value.exit_code == 1


@pytest.mark.parametrize("error", [psycopg.errors.DiskFull("no space"), psycopg.errors.SyntaxError("at or near")])
def test_other_errors_of_postgres_keep_their_traceback(error: psycopg.Error) -> None:
    with pytest.raises(type(error)):
        ran(error)
