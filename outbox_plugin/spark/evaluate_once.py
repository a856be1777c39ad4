"""Evaluates the common part of business rows and events once, so that a row and its event agree.

Spark evaluates a DataFrame again in each of its jobs. With `current_timestamp()`, a function that draws a UUID, or a
table that changes meanwhile, a row would get one value and its event another. So this module finds the part that both
plans have in common, evaluates it, and replaces it by the result in both. The result is a local checkpoint, which Spark
never evaluates again: if an executor that holds a part of it is lost, the job fails and nothing is written. A cached
DataFrame would not do: Spark silently evaluates a lost part of it again.

A part that one of them uses within a subquery of an expression, as in `IN (SELECT …)`, cannot be replaced. It is
refused if the other one has it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from outbox_plugin.errors import OutboxError
from outbox_plugin.spark.kafka_source import SPARK_SAYS
from outbox_plugin.spark.options import OptionWrong

_Plan = Any  # Spark's LogicalPlan, in the JVM.


class EvaluationLost(OutboxError):
    """The data that rows and events are made of is lost. It is not evaluated again, because the result could differ."""


@contextmanager
def evaluated_once(rows: DataFrame, events: DataFrame) -> Iterator[tuple[DataFrame, DataFrame]]:
    """Yield the two DataFrames with their common part evaluated; the result is kept until the context ends.

    Raises:
        OptionWrong: over Spark Connect, their common part is not a checkpoint; or they share a part of a subquery.
        EvaluationLost: an executor that held a part of the result is lost.
    """
    if not hasattr(rows, "_jdf"):
        _require_checkpoint(rows, events)
        yield rows, events
        return
    session = rows.sparkSession
    first, second = (frame._jdf.queryExecution().analyzed() for frame in (rows, events))
    evaluated: list[tuple[_Plan, _Plan]] = []
    try:
        for shared in _in_common(first, second):
            checkpoint = _frame(session, _replaced(session, shared, evaluated)).localCheckpoint()
            largest_first = (shared, checkpoint._jdf.queryExecution().analyzed())
            evaluated.insert(0, largest_first)
        rows_once, events_once = (_replaced(session, plan, evaluated) for plan in (first, second))
        _require_own_subqueries(rows_once, second)
        _require_own_subqueries(events_once, first)
        yield _frame(session, rows_once), _frame(session, events_once)
    except SPARK_SAYS as error:
        if "CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND" not in str(error):
            raise
        raise EvaluationLost(
            "an executor that held the data of rows and events is lost; nothing was written: run the job again"
        ) from None
    finally:
        for _, checkpoint in evaluated:
            checkpoint.rdd().unpersist(False)


def _in_common(first: _Plan, second: _Plan) -> list[_Plan]:
    """The largest parts of the plan `second` that are in `first` too. Smaller parts come first."""
    known = _by_hash(_nodes(first))
    shared: list[_Plan] = []

    def search(node: _Plan) -> None:
        if not _is_among(known, node):
            for child in _children(node):
                search(child)
        elif not any(node.sameResult(other) for other in shared):
            shared.append(node)

    search(second)
    return sorted(shared, key=lambda node: len(_nodes(node)))


def _require_own_subqueries(plan: _Plan, other: _Plan) -> None:
    """Check that no subquery in the expressions of `plan` has a part of `other`. A mere table in both is no such part.

    Raises:
        OptionWrong: one has.
    """
    within = [node for node in _within_subqueries(plan) if node.canonicalized().children().size()]
    if not within:
        return
    known = _by_hash([*_nodes(other), *_within_subqueries(other)])
    if any(_is_among(known, node) for node in within):
        raise OptionWrong(
            "rows and events are evaluated apart where a subquery, as in IN (SELECT …), has what both are made of, and "
            "may disagree: use a join in its place, or make both of a DataFrame that localCheckpoint() has returned"
        )


def _by_hash(nodes: list[_Plan]) -> dict[int, list[_Plan]]:
    known: dict[int, list[_Plan]] = {}
    for node in nodes:
        known.setdefault(node.semanticHash(), []).append(node)
    return known


def _is_among(known: dict[int, list[_Plan]], node: _Plan) -> bool:
    return any(node.sameResult(each) for each in known.get(node.semanticHash(), ()))


def _replaced(session: SparkSession, plan: _Plan, evaluated: list[tuple[_Plan, _Plan]]) -> _Plan:
    """The plan, in which each evaluated part is replaced by its result."""
    for part, checkpoint in evaluated:
        if plan.semanticHash() == part.semanticHash() and plan.sameResult(part):
            return _with_output(session, checkpoint, plan)
    before = _children(plan)
    after = [_replaced(session, child, evaluated) for child in before]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return plan
    return plan.withNewChildren(_jvm(session).PythonUtils.toSeq(after))


def _with_output(session: SparkSession, checkpoint: _Plan, plan: _Plan) -> _Plan:
    """The checkpoint, with the column ids of `plan`: the plan's parent nodes refer to the columns by these ids."""
    gateway: Any = session.sparkContext._gateway
    arguments = gateway.new_array(_jvm(session).java.lang.Object, checkpoint.productArity())
    arguments[0] = plan.output()
    for place in range(1, checkpoint.productArity()):
        arguments[place] = checkpoint.productElement(place)
    return checkpoint.makeCopy(arguments)


def _nodes(plan: _Plan) -> list[_Plan]:
    return [plan, *(node for child in _children(plan) for node in _nodes(child))]


def _within_subqueries(plan: _Plan) -> list[_Plan]:
    """The nodes of all subqueries in the expressions of `plan`, and of the subqueries in these."""
    queries = [query for node in _nodes(plan) for query in _elements(node.subqueries())]
    return [each for query in queries for each in (*_nodes(query), *_within_subqueries(query))]


def _children(plan: _Plan) -> list[_Plan]:
    return _elements(plan.children())


def _elements(sequence: Any) -> list[_Plan]:
    return [sequence.apply(place) for place in range(sequence.size())]


def _frame(session: SparkSession, plan: _Plan) -> DataFrame:
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

    return ClassicDataFrame(
        _jvm(session).org.apache.spark.sql.classic.Dataset.ofRows(session._jsparkSession, plan), session
    )


def _jvm(session: SparkSession) -> Any:
    return session.sparkContext._jvm


def _require_checkpoint(rows: DataFrame, events: DataFrame) -> None:
    from pyspark.sql.connect.plan import CachedRemoteRelation, LogicalPlan

    def leaves(plan: LogicalPlan) -> set[LogicalPlan]:
        children = [each for each in vars(plan).values() if isinstance(each, LogicalPlan)]
        return {leaf for child in children for leaf in leaves(child)} if children else {plan}

    plans: list[Any] = [rows._plan, events._plan]
    shared = leaves(plans[0]) & leaves(plans[1])
    if not all(isinstance(leaf, CachedRemoteRelation) for leaf in shared):
        raise OptionWrong(
            "over Spark Connect, rows and events are evaluated separately, so a row and its event may differ: "
            "call localCheckpoint() on the DataFrame that both are made of, and make both of the result"
        )
