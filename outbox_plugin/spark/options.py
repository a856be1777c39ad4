"""The options of `df.write.format("outbox")`: their names, and what they may be. No I/O."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from outbox_plugin.core.job_id import check_job_id
from outbox_plugin.errors import UserError

OnBadRow = Literal["fail", "deadLetter"]
_KNOWN = ("dsn", "table", "topic", "orderBy", "businessTable", "jobId", "onBadRow")
# What a job that wrote to Kafka, or a stream, has set beside: it means nothing here, and harms nobody.
_OF_OTHERS = ("checkpointlocation", "includeheaders", "path")


class OptionWrong(UserError):
    """An option of the sink, or an argument of OutboxWrite, is not known, or is not what it may be."""


@dataclass(frozen=True)
class SinkOptions:
    """What a write was asked to do."""

    settings: dict[str, Any]  # Those that are given; the others come from the environment.
    topic: str | None
    order_by: tuple[str, ...]
    business_table: str | None
    job_id: str
    set_aside: bool


def sink_options(given: Mapping[str, str], *, streaming: bool = False) -> SinkOptions:
    """What the options say; their names' case does not matter.

    Raises:
        OptionWrong: one is not known, or not what it may be.
        InvalidSetting: the job id is empty, too long, or has a NUL.
    """
    options = {name.lower(): text for name, text in given.items()}
    lower = {name.lower(): name for name in _KNOWN}
    for name in options:
        if name not in lower and name not in _OF_OTHERS and not name.startswith("kafka."):
            raise OptionWrong(f"the option {name!r} is not known; the outbox's are {', '.join(_KNOWN)}")
    if streaming and "jobid" in options:
        raise OptionWrong("the option 'jobId' is not for a stream: its query id tells it from others, across restarts")
    on_bad_row = options.get("onbadrow", "fail")
    policies = {policy.lower(): policy for policy in get_args(OnBadRow)}
    if on_bad_row.lower() not in policies:
        raise OptionWrong(f"the option 'onBadRow' is {on_bad_row!r}; expected {' or '.join(get_args(OnBadRow))}")
    job_id = options.get("jobid", uuid.uuid4().hex)
    check_job_id(job_id)
    return SinkOptions(
        settings={name: options[name] for name in ("dsn", "table") if name in options},
        topic=options.get("topic"),
        order_by=tuple(name.strip() for name in options.get("orderby", "").split(",") if name.strip()),
        business_table=options.get("businesstable"),
        job_id=job_id,
        set_aside=policies[on_bad_row.lower()] == "deadLetter",
    )
