"""What names a job that emits, so that Dagster's retries of it emit nothing again."""

from __future__ import annotations

from dagster import AssetExecutionContext, OutputContext

from outbox_plugin.core.job_id import JobName


def job_id(context: AssetExecutionContext) -> str:
    """The same for every attempt at materializing the asset (or the partitions of it) in `context`; for `OutboxWrite`.

    It is named by the first run, so a step that is retried and a run that is executed again, from the failure or as a
    whole, write nothing again once the job has been committed. A new materialization, or backfill, is a new job. An
    asset that commits several times adds what tells its jobs apart: `f"{job_id(context)}&of=payments"`.

    Example: `OutboxWrite(settings, job_id=job_id(context)).table(…).events(…).commit()`.
    """
    of = context.partition_key_range if context.has_partition_key or context.has_partition_key_range else None
    return JobName(
        context.run.root_run_id or context.run.run_id,
        tuple(tuple(key.path) for key in context.selected_asset_keys),
        None if of is None else (str(of.start), str(of.end)),
    ).text()


def output_job_id(context: OutputContext) -> str:
    """The same for every attempt at storing the output in `context`; another one than `job_id` gives for its step."""
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
