"""A process that an asset starts by Dagster Pipes emits: the blocks of the page, with real servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dagster import AssetKey, DagsterInstance, Definitions, PipesSubprocessClient

from outbox_plugin import Settings
from outbox_plugin.dagster import OutboxResource
from tests.documents import blocks
from tests.inbox_support import query

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:AssetExecutionContext.run_id is deprecated"),  # Dagster's own calls.
    pytest.mark.filterwarnings("ignore:.* is currently in preview"),
]


def test_a_process_of_pipes_emits_and_reports(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOX_DSN", settings.dsn.get_secret_value())
    monkeypatch.setenv("OUTBOX_BOOTSTRAP_SERVERS", settings.bootstrap_servers)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).resolve().parents[2]}")
    page = {block.file: block.text for block in blocks("how-to/declare-in-dagster.md", "python")}
    (tmp_path / "write_orders.py").write_text(page["write_orders.py"])
    names: dict[str, Any] = {}
    exec(compile(page["orders.py"], "orders.py", "exec", dont_inherit=True), names)
    outbox = OutboxResource(
        dsn=settings.dsn.get_secret_value(), bootstrap_servers=settings.bootstrap_servers, group=settings.group
    )
    resources = {"outbox": outbox, "pipes": PipesSubprocessClient()}
    job = Definitions(assets=[names["orders"]], resources=resources).resolve_implicit_global_asset_job_def()
    run_id = "b6b3a1f0-0000-4000-8000-000000000000"
    for attempt in range(2):  # The second one emits nothing again.
        with DagsterInstance.ephemeral() as instance:
            done = job.execute_in_process(run_id=run_id, instance=instance)
            latest = instance.get_latest_materialization_event(AssetKey("orders"))
        assert done.success, attempt
        assert latest is not None
        assert latest.asset_materialization is not None
        assert latest.asset_materialization.metadata["events"].value == 3
    emitted = query(settings, "SELECT kafka_topic, kafka_key, kafka_value FROM outbox ORDER BY id")
    assert emitted == [("orders", f"order-{number}", f'{{"order":{number}}}') for number in range(3)]
