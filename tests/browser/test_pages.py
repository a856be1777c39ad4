"""The plugin's pages in a real browser: the harvester's plots, the lineage, a pausing job, a check that fails.

Needs Chromium on the PATH (`apt-get install chromium`). With OUTBOX_SCREENSHOTS naming a folder, the pages are kept
there as the documentation shows them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from dagster_graphql import DagsterGraphQLClient
from playwright.sync_api import Page, expect, sync_playwright

from outbox_plugin import Settings, operate
from outbox_plugin.dagster.daemon import Daemon
from outbox_plugin.embedded.free_ports import free_port
from tests.harvesting import create_topic, drained, environment
from tests.support import PATIENCE, eventually

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENSHOTS = os.environ.get("OUTBOX_SCREENSHOTS")
pytestmark = [
    pytest.mark.long,
    pytest.mark.integration,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:Using variable_values and operation_name"),  # Dagster's own client.
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH"),
]

SECONDS = 60 * PATIENCE
SHOP = '''
import psycopg
from dagster import AssetSpec, Definitions, EnvVar, MaterializeResult, asset, in_process_executor

from outbox_plugin import Event, Outbox
from outbox_plugin.dagster import HarvesterResource, OutboxResource, Topic, build_outbox_definitions
from datetime import timedelta

outbox = OutboxResource(dsn=EnvVar("OUTBOX_DSN"), bootstrap_servers=EnvVar("OUTBOX_BOOTSTRAP_SERVERS"))
files = AssetSpec("order_files", description="What the shop's tills write.", group_name="shop")


@asset(deps=[files], kinds={"postgres"}, group_name="shop")
def shop_orders(outbox: OutboxResource) -> MaterializeResult:
    """Orders, and an event for each."""
    settings = outbox.settings()
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        events = (Event(topic="TOPIC", key=f"customer-{n % 50}", value={"order": n}) for n in range(2000))
        Outbox(settings.table).emit_many(connection, events)
    return MaterializeResult(metadata={"orders": 2000})


definitions = Definitions.merge(
    Definitions(assets=[files, shop_orders], executor=in_process_executor),
    build_outbox_definitions(
        HarvesterResource(outbox=outbox),
        [Topic("TOPIC", emitted_by=[shop_orders])],
        interval_seconds=2,
        drain_within=timedelta(seconds=30),
    ),
)
'''


class Shop:
    """A code location under `dagster dev`, and a browser page that looks at it."""

    def __init__(self, settings: Settings, topic: str, url: str, page: Page) -> None:
        self.settings, self.topic, self._url, self.page = settings, topic, url, page

    def open(self, path: str) -> None:
        self.page.goto(f"{self._url}{path}")

    def shows(self, text: str | re.Pattern[str]) -> None:
        expect(self.page.get_by_text(text).first).to_be_visible(timeout=SECONDS * 1000)

    def keep(self, name: str, seconds: float = 1.5) -> None:
        """As a picture, after so many seconds: of animations, or of ticks."""
        if SCREENSHOTS:
            self.page.wait_for_timeout(seconds * 1000)
            self.page.screenshot(path=str(Path(SCREENSHOTS) / f"{name}.png"))

    def materialize(self) -> None:
        host, port = self._url.removeprefix("http://").split(":")
        client = DagsterGraphQLClient(host, port_number=int(port))
        run = client.submit_job_execution("__ASSET_JOB", asset_selection=["shop_orders"])
        eventually(lambda: client.get_run_status(run).value in ("SUCCESS", "FAILURE"), 300)
        assert client.get_run_status(run).value == "SUCCESS"


@pytest.fixture
def shop(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home = tmp_path / "home"
    (home / ".nux").mkdir(parents=True)
    (home / ".nux" / "nux.yaml").write_text("seen: 1\n")  # No invitation over every page.
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    topic = create_topic(settings, "shop-orders")
    (tmp_path / "shop.py").write_text(SHOP.replace("TOPIC", topic))
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "dagster", "dev", "-f", "shop.py", "-h", "127.0.0.1", "-p", str(port)]
    env = {**environment(settings), "DAGSTER_HOME": str(home)}
    with (home / "dev.log").open("ab") as log:
        dev = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
    try:
        eventually(lambda: answers(url), 300)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.set_default_timeout(SECONDS * 1000)
            yield Shop(settings, topic, url, page)
            browser.close()
    finally:
        dev.send_signal(signal.SIGINT)
        dev.wait(60)
        daemon = Daemon.of(settings)
        daemon.release()
        eventually(lambda: not daemon.running, 30)


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/server_info", timeout=2).ok
    except requests.RequestException:
        return False


def test_what_a_user_sees(shop: Shop) -> None:
    """One walk through the pages, as they depend on what happened before."""
    shop.materialize()
    drained(shop.settings)

    shop.open(f"/assets/kafka/{shop.topic}?view=lineage&lineageScope=upstream&lineageDepth=5")
    for asset in ("order_files", "shop_orders", "outbox"):
        shop.shows(re.compile(f"^{asset}$"))
    shop.keep("lineage", 10)

    shop.open("/locations/shop.py/jobs/outbox_pause/playground")
    expect(shop.page.get_by_role("button", name="Launch Run")).to_be_enabled(timeout=SECONDS * 1000)
    shop.page.get_by_role("button", name="Launch Run").click()
    shop.shows(re.compile("the outbox is paused: events wait until it is resumed"))
    shop.keep("pause")

    shop.materialize()
    shop.open("/assets/shop_orders?view=checks&checkDetail=outbox_drained")
    shop.shows(re.compile("2000 events still wait after 30 s: shard 0 is paused"))
    shop.shows("what_to_do")
    shop.shows(re.compile("launch the job outbox_resume"))
    shop.keep("check")

    operate.resume(shop.settings)
    drained(shop.settings)

    shop.open("/assets/harvester")
    shop.page.get_by_text("Plots", exact=True).click()
    for plot in ("backlog", "cpu_percent", "takeovers", "records_per_second"):
        shop.shows(plot)
    assert shop.page.locator("canvas").count() >= 8
    shop.keep("harvester", 15)
