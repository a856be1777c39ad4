"""Helpers for tests of the port for operators: they choose a port, and read its answers."""

from __future__ import annotations

from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException

from prometheus_client.parser import text_string_to_metric_families

from outbox_plugin import Settings
from outbox_plugin.embedded.free_ports import free_port
from tests.support import PATIENCE, eventually

HOST = "127.0.0.1"


def listening(settings: Settings) -> Settings:
    """The settings, with a port of its own."""
    return settings.model_copy(update={"listen": str(free_port())})


def get(settings: Settings, path: str) -> tuple[int, str]:
    """The status and the body of an answer; status 0 if there is none."""
    with (
        suppress(OSError, HTTPException),
        closing(HTTPConnection(HOST, int(settings.listen or 0), timeout=30 * PATIENCE)) as connection,
    ):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    return 0, ""


def ready(settings: Settings) -> str:
    """The line of the only shard, if the harvester is ready."""
    status, said = get(settings, "/readyz")
    return said if status == 200 else ""


def not_ready(settings: Settings) -> str:
    """The line of the only shard, if the harvester is not ready."""
    status, said = get(settings, "/readyz")
    return said if status == 503 else ""


def leader_and_standby(one: Settings, another: Settings) -> tuple[Settings, Settings]:
    """Wait until one of two harvesters leads and the other stands by. A busy machine may end the first one's term."""

    found: list[tuple[Settings, Settings]] = []

    def one_of_them_leads() -> bool:
        orders = ((one, another), (another, one))
        found.extend(order for order in orders if "leads" in ready(order[0]) and "stands by" in ready(order[1]))
        return bool(found)

    eventually(one_of_them_leads, 60)
    return found[0]


def metrics(settings: Settings, group: str | None = None) -> dict[tuple[str, ...], float]:
    """Values of `group` (None: the outbox's) by the sample's name and what its labels say beside the group."""
    found = {}
    for family in text_string_to_metric_families(get(settings, "/metrics")[1]):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "group"]
            if sample.labels["group"] == (group or settings.group):
                found[(sample.name, *labels)] = sample.value
    return found


def shown(settings: Settings, *names: str) -> float | None:
    """One value; None where it is not shown."""
    return metrics(settings).get(names)
