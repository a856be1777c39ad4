"""Prometheus scrapes harvesters that lose their way to Postgres: an alert fires, and what the runbook says ends it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from psycopg.conninfo import conninfo_to_dict

from outbox_plugin import Settings
from outbox_plugin.bench.proxy import DIRECTIONS, Proxy
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.inbox import Inbox
from tests.documents import CHECKOUT
from tests.harvesting import harvesters, insert_numbered
from tests.inbox_support import make_effect_table, record_effect
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

ALERTS = CHECKOUT / "deploy" / "prometheus" / "alerts.yaml"


class Prometheus:
    """A server that scrapes every second and evaluates our rules."""

    def __init__(self, program: str, folder: Path, targets: list[str]) -> None:
        self._address = f"127.0.0.1:{free_port()}"
        config = folder / "prometheus.yml"
        config.write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(ALERTS)],
                    "scrape_configs": [{"job_name": "outbox", "static_configs": [{"targets": targets}]}],
                }
            )
        )
        files = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        self._process = subprocess.Popen(
            [program, *files, f"--web.listen-address={self._address}", "--log.level=error"]
        )

    def ask(self, path: str) -> Any:
        with suppress(URLError, ConnectionError), urlopen(f"http://{self._address}/api/v1/{path}") as answer:
            return json.load(answer)["data"]
        return {}

    def state(self, alert: str) -> str:
        """`inactive`, `pending` or `firing`."""
        rules = [rule for group in self.ask("rules").get("groups", ()) for rule in group["rules"]]
        return next((rule["state"] for rule in rules if rule["name"] == alert), "unknown")

    def scraped(self) -> int:
        """How many harvesters answer."""
        return sum(target["health"] == "up" for target in self.ask("targets").get("activeTargets", ()))

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30 * PATIENCE)


@pytest.fixture
def cut_off(settings: Settings) -> Iterator[tuple[Proxy, Settings]]:
    """A way to Postgres that can be made to go wrong, and settings that lead through it."""
    dsn = settings.dsn.get_secret_value()
    with Proxy(int(str(conninfo_to_dict(dsn)["port"]))) as proxy:
        through = dsn.replace(f":{proxy.target}/", f":{proxy.port}/")
        yield proxy, settings.model_copy(update={"dsn": type(settings.dsn)(through)})


PANELS = json.loads((CHECKOUT / "deploy" / "grafana" / "outbox.json").read_text(encoding="utf-8"))["panels"]
# Their series begin with what they count. Those of consumers without rebalances are not started here.
RARE = {
    "Failed transactions a second",
    "Rows that Kafka refused",
    "Terms that ended",
    "Takeovers",
    "Inbox: retries and dead letters",
}


def found(prometheus: Prometheus, query: str) -> list[Any] | None:
    """The series that Prometheus finds for a query of the dashboard; None where it does not evaluate the query."""
    for name, value in (("$group", ".+"), ("$__rate_interval", "1m")):  # As Grafana fills them in.
        query = query.replace(name, value)
    result: list[Any] | None = prometheus.ask(f"query?{urlencode({'query': query})}").get("result")
    return result


def test_prometheus_answers_each_query_of_the_dashboard(
    settings: Settings, topic: str, group: str, tmp_path: Path
) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus is not installed")
    make_effect_table(settings)
    first, second = (settings.model_copy(update={"listen": str(free_port())}) for _ in range(2))
    prometheus = Prometheus(program, tmp_path, [f"127.0.0.1:{each.listen}" for each in (first, second)])
    queries = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
    try:
        with (
            harvesters(first, tmp_path / "logs"),
            Inbox(second, group=group, topics=[topic], handler=record_effect),
        ):
            insert_numbered(settings, topic, 1, 10)
            eventually(lambda: prometheus.scraped() == 2, 60)
            for title, query in queries:
                if title in RARE or title.startswith("Coordination"):
                    assert found(prometheus, query) is not None, query
                else:
                    eventually(partial(found, prometheus, query), 60)
    finally:
        prometheus.stop()


def test_an_alert_fires_and_the_runbook_ends_it(
    settings: Settings, cut_off: tuple[Proxy, Settings], topic: str, tmp_path: Path
) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus is not installed")
    proxy, through = cut_off
    ports = [str(free_port()) for _ in range(3)]
    first, second, third = (
        base.model_copy(update={"listen": port}) for base, port in zip((through, through, settings), ports, strict=True)
    )
    prometheus = Prometheus(program, tmp_path, [f"127.0.0.1:{port}" for port in ports])
    try:
        with harvesters(first, tmp_path / "first") as [one], harvesters(second, tmp_path / "second") as [other]:
            eventually(lambda: one.leads() or other.leads(), 60)
            eventually(lambda: prometheus.scraped() == 2, 60)
            eventually(lambda: prometheus.state("OutboxNoLeader") == "inactive", 60)
            insert_numbered(settings, topic, 1, 10)
            proxy.hold(*DIRECTIONS)
            insert_numbered(settings, topic, 11, 10)
            eventually(lambda: prometheus.state("OutboxNoLeader") == "firing", 90)
            with harvesters(
                third, tmp_path / "third"
            ):  # As OutboxNoLeader's section says: one that reaches both servers.
                eventually(lambda: prometheus.state("OutboxNoLeader") == "inactive", 60)
            proxy.restore()
    finally:
        prometheus.stop()
