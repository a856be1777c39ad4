"""Ids for jobs that emit, by which Dagster's retries of a job emit nothing again."""

from __future__ import annotations

from dagster import AssetExecutionContext, OutputContext

from outbox_plugin.core.job_id import JobName


def job_id(context: AssetExecutionContext) -> str:
    """The id of a job for `OutboxWrite`: the same in every attempt at materializing the asset, or its partitions.

    The id has the first run's id. So once the job has been committed, a retried step or a run that is executed again
    writes nothing again. A new materialization or backfill is a new job. An asset that commits several times appends a
    name to tell its jobs apart: `f"{job_id(context)}&of=payments"`.

    Example: `OutboxWrite(settings, job_id=job_id(context)).table(…).events(…).commit()`.
    """
    of = context.partition_key_range if context.has_partition_key or context.has_partition_key_range else None
    return JobName(
        context.run.root_run_id or context.run.run_id,
        tuple(tuple(key.path) for key in context.selected_asset_keys),
        None if of is None else (str(of.start), str(of.end)),
    ).text()


def output_job_id(context: OutputContext) -> str:
    """The id of the job that stores an output: the same in every attempt, and not the one that `job_id` gives."""
    step = context.step_context
    run = step.dagster_run
    of = step.partition_key_range if step.has_partition_key or step.has_partition_key_range else None
    mapped = [context.mapping_key] if context.mapping_key else []
    return JobName(
        run.root_run_id or run.run_id,
        (tuple(context.asset_key.path),) if context.has_asset_key else (),
        None if of is None else (str(of.start), str(of.end)),
        (context.step_key, context.name, *mapped),
    ).text()
