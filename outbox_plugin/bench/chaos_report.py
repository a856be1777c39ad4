"""The report of a chaos run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from outbox_plugin.bench.gaps import Gap
from outbox_plugin.bench.judge import Verdict
from outbox_plugin.bench.samples import Sampled
from outbox_plugin.core.delivery_options import BadRows, Delivery


@dataclass(frozen=True)
class ChaosReport:
    """The faults of a run, and what became of the rows.

    `faults` counts faults by their kind; `ended` counts harvesters that ended, by exit code or signal.
    """

    delivery: Delivery
    bad_rows: BadRows
    shards: int
    seed: int
    seconds: float
    verdict: Verdict
    faults: dict[str, int]
    transactions: int
    rolled_back: int
    ended: dict[int, int]
    drain_seconds: float
    longest_gap: Gap
    sampled: list[Sampled]
    tracebacks: int
    failures: list[str]

    @property
    def records_per_second(self) -> float:
        """Records that arrived, over the length of the run and of the drain."""
        return self.verdict.arrived / (self.seconds + self.drain_seconds)

    @property
    def clean(self) -> bool:
        """Whether no promise was broken, and nothing hung. With at-least-once delivery, rows may be repeated."""
        verdict = self.verdict
        repeated = verdict.duplicates if self.delivery == "exactly-once" else 0
        return not (verdict.lost or repeated or verdict.order_violations or verdict.phantoms or self.failures)

    def lines(self) -> list[str]:
        """The report as lines of text."""
        verdict = self.verdict
        return [
            *verdict.examples,
            *self.failures,
            *map(str, self.sampled),
            str(self.longest_gap),
            f"faults: {', '.join(f'{count} {kind}' for kind, count in sorted(self.faults.items()))}",
            f"{verdict.committed:,} rows of {self.transactions:,} transactions committed, {self.rolled_back:,} "
            f"transactions rolled back; {verdict.arrived:,} rows arrived, {self.records_per_second:,.0f} records/s; "
            f"{verdict.aside:,} bad rows ended {self._aside}; drained in {self.drain_seconds} s",
            f"{verdict.lost} lost, {verdict.duplicates} duplicates, {verdict.order_violations} order violations, "
            f"{verdict.phantoms} phantoms",
        ]

    @property
    def _aside(self) -> str:
        return "in topics made later" if self.bad_rows == "park" else "among the dead letters"

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        values = asdict(self)
        verdict = values.pop("verdict")
        values["longest_gap"] = {
            **self.longest_gap._asdict(),
            "faults": [each._asdict() for each in self.longest_gap.faults],
        }
        values["sampled"] = [{**each._asdict(), "trend": each.trend._asdict()} for each in self.sampled]
        return {"clean": self.clean, **verdict, **values, "records_per_second": round(self.records_per_second, 1)}
