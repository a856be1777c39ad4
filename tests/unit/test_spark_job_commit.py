"""What a job reports if it loses Postgres during its commit, with connections that are lost on cue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from outbox_plugin.errors import CommitUnknown
from outbox_plugin.spark import sink, staging
from outbox_plugin.spark.columns import event_form
from outbox_plugin.spark.job_commit import (
    CommitAttempt,
    CommitRecord,
    CommitSession,
    Connection,
    Outcome,
    StagedWrite,
    batch_record,
    commit_once,
    job_record,
    record_and_publish,
)
from outbox_plugin.spark.publish import Staged, StagingLost
from outbox_plugin.spark.staging import new_staging_table

EVENTS = event_form(StructType([StructField("key", StringType()), StructField("value", StringType())]), "t")


class FakeConnection:
    """A connection that a statement loses, or that answers each one with a row.

    Attributes:
        loses: the statement that is not answered.
        closed: as psycopg's, whether the connection is lost.
        rows: what each statement returns.
        rowcount: how many rows each statement writes.
        is_standby: whether the server refuses writes, and says so.
        info: what the server says of itself.
    """

    def __init__(self, loses: str = "", *, rows: list[tuple[int]] | None = None, is_standby: bool = False) -> None:
        self.loses = loses
        self.closed = False
        self.rowcount = 0
        self.rows = [(0,)] if rows is None else rows
        self.is_standby = is_standby
        self.info = SimpleNamespace(parameter_status={"in_hot_standby": "on" if is_standby else "off"}.get)

    def __enter__(self) -> FakeConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True

    def execute(self, *_: object) -> FakeConnection:
        if self.is_standby:
            raise psycopg.errors.ReadOnlySqlTransaction("cannot execute INSERT in a read-only transaction")
        return self

    def fetchall(self) -> list[tuple[int]]:
        return self.rows

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """As psycopg's: if the connection is lost during a rollback, the error that led to it goes on."""
        try:
            yield
        except psycopg.Rollback:
            if self.loses == "ROLLBACK":
                self.close()
                raise
        else:
            if self.loses == "COMMIT":
                self.close()
                raise psycopg.OperationalError("the connection is lost")


def commit(
    first: FakeConnection,
    second: FakeConnection | Callable[[], FakeConnection],
    publish: Callable[[CommitAttempt], Outcome],
) -> Outcome:
    again = (lambda: second) if isinstance(second, FakeConnection) else second
    connections = chain([first], iter(again, None))
    with CommitSession(lambda: cast(Connection, next(connections))) as session:
        return commit_once(session, publish, "run it again")


def record(attempt: CommitAttempt) -> Outcome:
    return record_and_publish(attempt, "outbox", job_record("job"), StagedWrite(None, None))


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "RESTART_SECONDS", 0.0)


@pytest.mark.parametrize(
    "error", [psycopg.errors.ReadOnlySqlTransaction, psycopg.InterfaceError, psycopg.errors.QueryCanceled]
)
def test_whatever_prevents_the_repeat_of_a_lost_commit_leaves_its_outcome_unknown(error: type[psycopg.Error]) -> None:
    def publish(attempt: CommitAttempt) -> Outcome:
        if attempt.connection is cast(object, second):
            raise error("prevented")
        return record(attempt)

    second = FakeConnection()
    with pytest.raises(CommitUnknown, match=r"its outcome could not be found out \(prevented\): .*: run it again$"):
        commit(FakeConnection("COMMIT"), second, publish)


def test_a_repeat_that_has_recorded_the_commit_proves_that_the_first_did_not_succeed() -> None:
    def publish(attempt: CommitAttempt) -> Outcome:
        outcome = record(attempt)
        if attempt.connection is cast(object, second):
            raise psycopg.errors.DiskFull("no space")
        return outcome

    second = FakeConnection()
    with pytest.raises(psycopg.errors.DiskFull):
        commit(FakeConnection("COMMIT"), second, publish)


def test_a_repeat_that_is_lost_during_its_own_commit_leaves_its_outcome_unknown() -> None:
    def publish(attempt: CommitAttempt) -> Outcome:
        if attempt.connection is cast(object, first):
            first.close()
            raise psycopg.OperationalError("lost before the commit")
        return record(attempt)

    first = FakeConnection()
    with pytest.raises(CommitUnknown):
        commit(first, FakeConnection("COMMIT"), publish)


def test_what_was_lost_before_a_commit_is_a_plain_failure() -> None:
    def publish(attempt: CommitAttempt) -> Outcome:
        cast(FakeConnection, attempt.connection).close()
        raise psycopg.OperationalError("lost before the commit")

    with pytest.raises(psycopg.OperationalError):
        commit(FakeConnection(), FakeConnection(), publish)


def test_a_standby_is_asked_again_until_it_is_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "RESTART_SECONDS", 30.0)
    servers = iter([FakeConnection(is_standby=True), FakeConnection(rows=[])])
    assert commit(FakeConnection("COMMIT"), lambda: next(servers), record) is Outcome.PUBLISHED


@pytest.mark.parametrize("outcome", [Outcome.RECORDED_BEFORE, Outcome.DECLINED])
def test_a_connection_that_is_lost_during_a_rollback_leaves_no_doubt(outcome: Outcome) -> None:
    assert commit(FakeConnection("ROLLBACK"), FakeConnection(), lambda _: outcome) is outcome


def test_a_batch_whose_staged_rows_are_gone_once_it_is_committed_is_repeated_under_the_record_that_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A crash of Postgres empties the staging table, of which the record has a digest."""

    def record_of(_: Connection) -> CommitRecord:
        if len(connected) > 1:
            raise StagingLost("nothing was written")
        return batch_record("query", 1, "digest")

    def connect(_: object) -> FakeConnection:
        connected.append(FakeConnection(rows=[]) if connected else FakeConnection("COMMIT"))
        return connected[-1]

    connected: list[FakeConnection] = []
    monkeypatch.setattr(sink, "_connected", connect)
    staged = Staged(new_staging_table("outbox", EVENTS, None, None), [])
    options = SimpleNamespace(business_table=None)
    written = sink._Sink(cast(Any, None), cast(Any, options), EVENTS, "outbox")
    written.publish(staged, "query", "start the stream again", record_of)
    assert len(connected) == 2
