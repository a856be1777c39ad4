"""The options of `df.write.format("outbox")`: their names and allowed values. No I/O."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from outbox_plugin.core.job_id import check_job_id
from outbox_plugin.errors import UserError

OnBadRow = Literal["fail", "deadLetter"]
_KNOWN = ("dsn", "table", "topic", "orderBy", "businessTable", "jobId", "onBadRow")
# Options of Spark and of its Kafka sink. A job may keep them: they have no effect here.
_IGNORED = ("checkpointlocation", "includeheaders", "path")


class OptionWrong(UserError):
    """An option of the sink, or an argument of OutboxWrite, is unknown or has a value that is not allowed."""


@dataclass(frozen=True)
class SinkOptions:
    """The options of a write, checked."""

    settings: dict[str, Any]  # Settings that are given as options; the others come from the environment.
    topic: str | None
    order_by: tuple[str, ...]
    business_table: str | None
    job_id: str
    dead_letter: bool  # Bad events become dead letters. If False, the first one fails the job.


def sink_options(given: Mapping[str, str], *, streaming: bool = False) -> SinkOptions:
    """Check the options of a write. The case of their names does not matter.

    Raises:
        OptionWrong: an option is unknown, or its value is not allowed.
        InvalidSetting: the job id is empty, too long, or has a NUL.
    """
    options = {name.lower(): text for name, text in given.items()}
    lower = {name.lower(): name for name in _KNOWN}
    for name in options:
        if name not in lower and name not in _IGNORED and not name.startswith("kafka."):
            raise OptionWrong(f"the option {name!r} is not known; the outbox's are {', '.join(_KNOWN)}")
    if streaming and "jobid" in options:
        raise OptionWrong("the option 'jobId' is not for a stream: its query id identifies it, also after a restart")
    on_bad_row = options.get("onbadrow", "fail")
    policies = {policy.lower(): policy for policy in get_args(OnBadRow)}
    if on_bad_row.lower() not in policies:
        raise OptionWrong(f"the option 'onBadRow' is {on_bad_row!r}; expected {' or '.join(get_args(OnBadRow))}")
    if options.get("businesstable") == "":
        raise OptionWrong("the option 'businessTable' is empty; expected the name of a table")
    job_id = options.get("jobid", uuid.uuid4().hex)
    check_job_id(job_id)
    return SinkOptions(
        settings={name: options[name] for name in ("dsn", "table") if name in options},
        topic=options.get("topic"),
        order_by=tuple(name.strip() for name in options.get("orderby", "").split(",") if name.strip()),
        business_table=options.get("businesstable"),
        job_id=job_id,
        dead_letter=policies[on_bad_row.lower()] == "deadLetter",
    )
