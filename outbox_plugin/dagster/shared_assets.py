"""Whether another outbox reports on the same asset.

Asset keys are those of the whole deployment, not of a code location. If two outboxes have the same keys, each check
shows what was last said of either, so a healthy outbox hides another one's trouble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dagster import AssetKey, DagsterInstance, TextMetadataValue

from outbox_plugin.dagster.outbox_address import outbox_address
from outbox_plugin.printable import printable
from outbox_plugin.settings import Settings
from outbox_plugin.status.health_rules import HealthResult

OUTBOX = "outbox"  # The metadata that names the outbox.
OBSERVATIONS = 6  # So many are looked at. Once an outbox has other keys, the check passes again after as many ticks.


def outbox_name(settings: Settings) -> str:
    """What distinguishes an outbox from others of the same deployment: its table, database and group."""
    address = outbox_address(settings)
    return printable(
        f"table {address.table} of {address.server}:{address.port}/{address.database}, group {address.group}"
    )


def observed_outboxes(instance: DagsterInstance, asset: AssetKey) -> list[str]:
    """The outboxes of the asset's last observations, the newest first."""
    names = []
    for record in instance.fetch_observations(asset, OBSERVATIONS).records:
        observation = record.asset_observation
        name = observation.metadata.get(OUTBOX) if observation is not None else None
        if isinstance(name, TextMetadataValue) and name.text:
            names.append(name.text)
    return names


def other_outbox(observed: Sequence[str], ours: str) -> str | None:
    """Another outbox that takes turns with ours; None if there is none.

    One that was observed before ours alone is no other outbox: somebody has changed the table or the group.

    Args:
        observed: the outboxes of the last observations, the newest first.
        ours: the name of our outbox.
    """
    if ours not in observed:
        return None
    since_ours = observed[: len(observed) - observed[::-1].index(ours)]
    return next((name for name in since_ours if name != ours), None)


def judge_sharing(healthy: HealthResult, observed: Sequence[str], ours: str) -> HealthResult:
    """The result of the check `healthy`. It is an error if another outbox reports on the same assets.

    Args:
        healthy: what the check has found of our outbox.
        observed: the outboxes of the last observations, the newest first.
        ours: the name of our outbox.
    """
    if (other := other_outbox(observed, ours)) is None:
        return healthy
    explanation = f"two outboxes report on the same assets, so these show both mixed: {ours}; {other}"
    return replace(
        healthy,
        passed=False,
        severe=True,
        explanation=explanation if healthy.passed else f"{explanation}; {healthy.explanation}",
        what_to_do="Give one of the two outboxes a prefix of its own. Other code locations share asset keys, too. If "
        "they are one outbox, give both code locations the same settings.",
    )
