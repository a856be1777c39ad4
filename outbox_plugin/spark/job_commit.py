"""The commit of a Spark job, or of a stream's batch: the same for `OutboxWrite` and for the data source.

    1. `is_committed`: if the job was committed before under its id, nothing is staged.
    2. Tasks stage their rows (`staging`), each under an attempt id of its own.
    3. `publish.accepted`: only the rows of the attempts that Spark accepted count.
    4. `record_and_publish`: one transaction records the job, or the batch of a stream, and publishes its rows.
    5. `commit_once`: if the connection is lost before the answer to the commit, the transaction is tried once more.

The record makes a commit happen once: a second commit with the same id finds the record and publishes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, Literal, Self

import psycopg
from psycopg import sql

from outbox_plugin.core.job_id import former_job_ids
from outbox_plugin.errors import CommitUnknown
from outbox_plugin.printable import one_line
from outbox_plugin.schema.connection import connect_patiently
from outbox_plugin.schema.orphaned_staging_tables import drop_orphans
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings
from outbox_plugin.spark.publish import Staged, publish_events, publish_rows
from outbox_plugin.spark.staging import ISOLATION, StagingTable, retry_connecting

Connection = psycopg.Connection[tuple[Any, ...]]


class Outcome(Enum):
    """What a transaction of a commit has done."""

    PUBLISHED = auto()
    RECORDED_BEFORE = auto()  # By an earlier commit of the same job or batch.
    DECLINED = auto()  # By the condition of the write.


@dataclass(frozen=True)
class CommitRecord:
    """The row that records a commit: of a job in `outbox_job`, or of a batch in `outbox_stream`."""

    statement: Literal["record_job", "record_batch"]
    job_id: str  # For a stream's batch, the id of its query.
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of `statement`, without the number of events."""
        return {"job_id": self.job_id, **self.values}


def job_record(job_id: str) -> CommitRecord:
    """The record of a job. It also matches a record that an earlier version made under its own form of the id."""
    return CommitRecord("record_job", job_id, {"former": former_job_ids(job_id)})


def batch_record(query_id: str, batch_id: int, digest: str) -> CommitRecord:
    """The record of a batch.

    Args:
        query_id: the streaming query.
        batch_id: the number that Spark has given the batch.
        digest: of the batch's events. It differs if Spark has put other events under the same number.
    """
    return CommitRecord("record_batch", query_id, {"batch_id": batch_id, "digest": digest})


@dataclass(frozen=True)
class StagedWrite:
    """Everything that one commit publishes. Rows and events may be staged in one table, or in a table each.

    Attributes:
        rows: the business rows.
        events: the events.
        replaced: business rows that meet this condition are deleted first; None deletes none.
        on_conflict: follows ON CONFLICT in the INSERT of the business rows.
    """

    rows: Staged | None
    events: Staged | None
    replaced: sql.Composable | None = None
    on_conflict: sql.Composable | None = None


def driver_connection(settings: Settings, purpose: str) -> Connection:
    """Connect for the part of a job that its driver does. `purpose` is the name that Postgres shows."""
    connection = connect_patiently(settings, purpose=purpose)
    connection.isolation_level = ISOLATION
    return connection


class CommitSession:
    """A job's connection to Postgres. If it is lost during the commit, another takes its place."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        """Connect."""
        self._connect = connect
        self.connection = connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def reconnect(self) -> None:
        """Replace a connection that is lost. Waits if Postgres is restarting, or a standby is about to be promoted."""
        self.connection = retry_connecting(partial(_connected_to_primary, self._connect))


@dataclass
class CommitAttempt:
    """One transaction of a commit.

    Attributes:
        connection: outside a transaction, until `run` begins one.
        has_recorded: whether the record was inserted in it. Then no earlier attempt has committed.
        was_committing: whether its COMMIT may have been sent.
    """

    connection: Connection
    has_recorded: bool = False
    was_committing: bool = False

    def run(self, publish: Callable[[CommitAttempt], Outcome]) -> Outcome:
        """Run `publish` in the transaction, which is rolled back unless `publish` returns `PUBLISHED`."""
        with suppress(psycopg.Rollback), self.connection.transaction() as transaction:
            outcome = publish(self)
            if outcome is not Outcome.PUBLISHED:
                raise psycopg.Rollback(transaction)
            self.was_committing = True
        return outcome

    @property
    def has_lost_its_answer(self) -> bool:
        """Whether the connection was lost during the commit, so that nobody knows whether it succeeded."""
        return self.was_committing and self.connection.closed


def is_committed(connection: Connection, outbox: str, record: CommitRecord) -> bool:
    """Whether the job has been committed. Also removes staging tables that its earlier runs left behind.

    Args:
        connection: to the outbox's database.
        outbox: the outbox's name, with its schema.
        record: of the job.
    """
    drop_orphans(connection, outbox, record.job_id)
    return bool(connection.execute(statement("staging", "find_job", outbox), record.parameters).fetchall())


def watch_client(connection: Connection, outbox: str) -> None:
    """Make Postgres end the transaction soon after this machine disappears. Call it first in a commit's transaction."""
    connection.execute(statement("probe", "watch_client", outbox))


def record_and_publish(
    attempt: CommitAttempt,
    outbox: str,
    record: CommitRecord,
    write: StagedWrite,
    condition: Callable[[Connection], bool] | None = None,
) -> Outcome:
    """Record a commit and publish its rows, in the transaction of `commit_once`.

    Args:
        attempt: in its transaction.
        outbox: the outbox's name, with its schema.
        record: of the commit.
        write: the staged rows.
        condition: runs before the rows are published. If it returns False, nothing is recorded or published.

    Raises:
        StagingLost: not all of the staged rows are there any more.
        RowsDropped: a table did not take all of the rows.
    """
    connection = attempt.connection
    parameters = {**record.parameters, "events": write.events.rows if write.events else 0}
    recorded = connection.execute(statement("staging", record.statement, outbox), parameters).fetchall()
    if not recorded:
        return Outcome.RECORDED_BEFORE
    attempt.has_recorded = True
    if condition and not _holds(condition, connection):
        return Outcome.DECLINED
    [(events_before,)] = recorded
    if write.rows:
        publish_rows(connection, write.rows, write.replaced, write.on_conflict)
    if write.events:
        publish_events(connection, write.events, record.job_id, events_before)
    return Outcome.PUBLISHED


def _holds(condition: Callable[[Connection], bool], connection: Connection) -> bool:
    """Whether the condition returns True. It runs in a savepoint of its own, and fails if it ends the transaction.

    A condition that raises `psycopg.Rollback` does not hold.
    """
    with suppress(psycopg.Rollback), connection.transaction():
        return condition(connection)
    return False


def commit_once(
    session: CommitSession,
    publish: Callable[[CommitAttempt], Outcome],
    run_again: str,
) -> Outcome:
    """Run `publish` in a transaction, which is rolled back unless `publish` returns `PUBLISHED`.

    A lost connection does not tell whether its transaction was committed. So `publish` runs once more on a new one: it
    waits until the server has ended the lost transaction. Then it finds the record, or publishes where there is
    none.

    Args:
        session: outside a transaction. It gets a new connection if it loses the one that it has.
        publish: records the commit and publishes its rows.
        run_again: what the user is told to do if the outcome cannot be found out.

    Raises:
        CommitUnknown: the connection was lost during the commit, and its outcome could not be found out.
    """
    first = CommitAttempt(session.connection)
    try:
        return first.run(publish)
    except psycopg.Error:
        if not session.connection.closed:
            raise
    second: CommitAttempt | None = None
    try:
        session.reconnect()
        second = CommitAttempt(session.connection)
        outcome = second.run(publish)
    except Exception as error:
        first_is_unknown = first.was_committing and not (second and second.has_recorded)
        if not (first_is_unknown or (second and second.has_lost_its_answer)):
            raise
        raise CommitUnknown(
            f"Postgres was lost during the commit, and its outcome could not be found out ({one_line(error)}): rows "
            f"and events were written together, or not at all: {run_again}"
        ) from None
    return Outcome.PUBLISHED if first.was_committing and outcome is Outcome.RECORDED_BEFORE else outcome


def _connected_to_primary(connect: Callable[[], Connection]) -> Connection:
    """Connect, and refuse a standby: after a failover, it takes no writes until it is promoted."""
    connection = connect()
    if connection.info.parameter_status("in_hot_standby") == "on":
        connection.close()
        raise psycopg.OperationalError("the server is a standby, which has not been promoted yet")
    return connection


def drop_or_leave(connection: Connection, *tables: StagingTable) -> None:
    """Remove staging tables. What Postgres refuses now, a later job removes.

    So it changes nothing in how a job ends: one that has committed does not fail, and one that fails says why.
    """
    for table in tables:
        with suppress(psycopg.Error):
            table.drop(connection)
