"""What names a job that emits, so that Dagster's retries of it emit nothing again."""

from __future__ import annotations

from dagster import AssetExecutionContext


def job_id(context: AssetExecutionContext) -> str:
    """The same for every attempt at materializing the asset (or the partition of it) in `context`; for `OutboxWrite`.

    It is named by the first run, so a step that is retried and a run that is executed again, from the failure or as a
    whole, write nothing again once the job has been committed. A new materialization, or backfill, is a new job.

    Example: `OutboxWrite(settings, job_id=job_id(context)).table(…).events(…).commit()`.
    """
    parts = [
        context.run.root_run_id or context.run.run_id,
        *(key.to_user_string() for key in context.selected_asset_keys),
    ]
    if context.has_partition_key_range:
        of = context.partition_key_range
        parts.append(of.start if of.start == of.end else f"{of.start}...{of.end}")
    return "/".join([parts[0], *sorted(parts[1:])])
