"""The id of a job that emits: the same text in each attempt of a job, and another text for each other job. No I/O.

A name is written like the query of a URL (RFC 3986): `run?asset=shop/orders&partition=eu&output=step/result`. Whatever
could be mistaken for a separator is percent-encoded, so two jobs cannot have the same name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from urllib.parse import quote, unquote

from outbox_plugin.errors import InvalidSetting

LONGEST_JOB_ID = 1_000  # A key of Postgres' index holds 2,700 bytes; and each event carries the name.
_LONGEST_NAME = 800  # Leaves room for what a caller adds to the name where one asset has several jobs.
_KINDS = {"asset", "partition", "to", "output"}
_PLAIN = " :|@,+[]()"  # Besides letters, digits and "-._~", these characters are not encoded.


@dataclass(frozen=True, slots=True)
class JobName:
    """Names a job by the run of an orchestrator and by what the job writes.

    Attributes:
        run: the first run. A run that executes it again has its name, too.
        assets: the keys of the assets that are written, each as its parts.
        partitions: the first and the last partition of the run.
        output: the step and its output, and the mapping key of a dynamic one, where an I/O manager writes it.
    """

    run: str
    assets: tuple[tuple[str, ...], ...] = ()
    partitions: tuple[str, str] | None = None
    output: tuple[str, ...] | None = None

    def text(self) -> str:
        """The name. A name that would be too long ends in a digest."""
        parts = [("asset", _joined(key)) for key in sorted(self.assets)]
        if self.partitions is not None:
            first, last = self.partitions
            parts += [("partition", _quoted(first)), *([] if first == last else [("to", _quoted(last))])]
        if self.output is not None:
            parts.append(("output", _joined(self.output)))
        name = f"{_quoted(self.run)}?{'&'.join(f'{kind}={value}' for kind, value in parts)}"
        if len(name) <= _LONGEST_NAME:
            return name
        return f"{_quoted(self.run)[:100]}?sha256={hashlib.sha256(name.encode()).hexdigest()}"


def check_job_id(job_id: str) -> None:
    """Check the id of a job.

    Raises:
        InvalidSetting: a job cannot have this id.
    """
    try:
        size = len(job_id.encode())
    except UnicodeEncodeError:  # It has a surrogate, which is a half of a character: Postgres stores none.
        size = 0
    if not 1 <= len(job_id) <= LONGEST_JOB_ID or "\0" in job_id or not 1 <= size <= 2 * LONGEST_JOB_ID:
        shown = job_id if len(job_id) < 100 else f"{job_id[:100]}…"
        raise InvalidSetting(
            f"job id: expected 1 to {LONGEST_JOB_ID} characters, without NULs and surrogates (given: {shown!r})"
        )


def former_job_ids(job_id: str) -> list[str]:
    """The ids that the version before this one may have given the same job. A retry after the upgrade looks for them.

    That version joined all parts by "/", so two jobs could have the same id. A row with such an id counts for both.
    A name that its caller has added to is of this version only.
    """
    run, _, query = job_id.partition("?")
    parts = [(kind, value) for kind, _, value in (part.partition("=") for part in query.split("&"))]
    if not {kind for kind, _ in parts} <= _KINDS:
        return []
    assets = [[unquote(each) for each in value.split("/")] for kind, value in parts if kind == "asset"]
    if not assets:
        return []
    named = dict(parts)
    first, last = unquote(named.get("partition", "")), unquote(named.get("to", ""))
    if "output" in named:  # Named by the I/O manager, which refused several partitions.
        of = [first] if "partition" in named else []
        return [] if "to" in named else ["/".join([unquote(run), *assets[0], *of])]
    keys = ["/".join(key) for key in assets]
    of = [f"{first}...{last}" if "to" in named else first] if "partition" in named else []
    # Depending on its launch, a run of one partition was named with the partition or without it.
    return list(dict.fromkeys("/".join([unquote(run), *sorted(each)]) for each in ([*keys, *of], keys)))


def _joined(parts: tuple[str, ...]) -> str:
    return "/".join(map(_quoted, parts))


def _quoted(text: str) -> str:
    return quote(text, safe=_PLAIN, errors="surrogatepass")
