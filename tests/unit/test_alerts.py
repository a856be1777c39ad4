"""The alerts and the dashboard: each alert has its runbook, and each query names metrics and labels that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from outbox_plugin.observe.coordination_metrics import CoordinationMetrics
from outbox_plugin.observe.harvester_metrics import HarvesterMetrics
from outbox_plugin.observe.inbox_metrics import InboxMetrics
from outbox_plugin.observe.tenants_telemetry import TenantMetrics
from tests.documents import CHECKOUT, anchors

DEPLOY = CHECKOUT / "deploy"
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((DEPLOY / "grafana" / "outbox.json").read_text(encoding="utf-8"))
RUNBOOK = CHECKOUT / "docs" / "how-to" / "answer-alerts.md"
MONITOR = CHECKOUT / "docs" / "how-to" / "monitor.md"
OF_PROMETHEUS = {"le"}


def queries() -> Iterator[tuple[str, str]]:
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def collectors() -> Iterator[MetricWrapperBase]:
    """All metrics that are served."""
    for kind in (HarvesterMetrics, TenantMetrics, InboxMetrics, CoordinationMetrics):
        yield from (each for each in vars(kind(CollectorRegistry())).values() if isinstance(each, MetricWrapperBase))


def served() -> dict[str, set[str]]:
    """What is served: the labels of each series."""
    found: dict[str, set[str]] = {}
    for collector in collectors():
        [described] = collector.describe()
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "gauge": [""]}[described.type]
        found |= {described.name + ending: set(collector._labelnames) | OF_PROMETHEUS for ending in endings}
    return found


def one_series_each() -> Iterator[tuple[str, set[str]]]:
    """Of each metric the series that the page names."""
    for collector in collectors():
        [described] = collector.describe()
        yield described.name + ("_total" if described.type == "counter" else ""), set(collector._labelnames)


@pytest.mark.parametrize(("name", "query"), list(queries()))
def test_a_query_names_what_is_served(name: str, query: str) -> None:
    labels = served()
    named = re.findall(r"outbox_\w+", query)
    assert named
    assert [each for each in named if each not in labels] == []
    for side in re.split(r"\s[<>]\s", query):
        known = [labels[each] for each in re.findall(r"outbox_\w+", side)]
        used = {label for part in re.findall(r"by \(([^)]*)\)", side) for label in part.split(", ")}
        used |= {label for part in re.findall(r"\{([^}]*)\}", side) for label in re.findall(r"(\w+)=", part)}
        assert not used or used <= set.intersection(*known)


def test_every_metric_is_listed_with_its_labels() -> None:
    rows = re.findall(r"^\| `(outbox_\w+)` \| \w+ \|(.*?)\|", MONITOR.read_text(encoding="utf-8"), re.MULTILINE)
    listed = {name: {"group", *re.findall(r"`(\w+)`", labels)} for name, labels in rows}
    named = dict(one_series_each())
    assert {name: listed.get(name) for name in named} == named


def test_every_alert_has_its_section_in_the_runbook_and_every_section_its_alert() -> None:
    titles = re.findall(r"^## (\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    assert titles == [rule["alert"] for rule in RULES]
    for rule in RULES:
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert CHECKOUT / page == RUNBOOK
        assert anchor in anchors(RUNBOOK)


def test_every_alert_is_tested() -> None:
    tests = yaml.safe_load((DEPLOY / "prometheus" / "alerts.test.yaml").read_text(encoding="utf-8"))["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in RULES}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == names


def test_the_rules_do_as_their_tests_say() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; it comes with Prometheus")
    done = subprocess.run(
        [promtool, "test", "rules", str(DEPLOY / "prometheus" / "alerts.test.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
