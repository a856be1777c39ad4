"""What one process does for many tenants, with harvesters that only note what is asked of them."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from outbox_plugin import Settings, tenants
from outbox_plugin.core.resting_tenants import ActivitySnapshot, OutboxActivity
from outbox_plugin.relay.events import Observer, TermBegan, TermFinished
from outbox_plugin.tenants import MAX_AWAKE, STARTS_AT_ONCE, TenantHarvesters
from tests.support import PATIENCE, eventually

SETTINGS = Settings(dsn="postgresql://nobody@127.0.0.1:1/x", bootstrap_servers="127.0.0.1:1", table="tenant_*.outbox")
UNTRUSTED = "its owner is not trusted"


class Noted:
    """A harvester whose start and stop do what the test says."""

    start_error: Exception | None = None
    stop_error: Exception | None = None
    error: Exception | None = None

    def __init__(self, settings: Settings, *, observe: Observer, adopt: bool, restarts: Noted | None = None) -> None:
        self.settings, self.observe, self.adopt, self.restarts = settings, observe, adopt, restarts

    def for_restart(self, observe: Observer) -> Noted:
        return Noted(self.settings, observe=observe, adopt=self.adopt, restarts=self)

    def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error

    def stop(self) -> None:
        if self.stop_error is not None:
            raise self.stop_error


@pytest.fixture(autouse=True)
def _harvesters_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "Harvester", Noted)


@pytest.fixture
def service() -> Any:
    """The service, not started."""
    return TenantHarvesters(SETTINGS)


def let_starts_end(service: Any) -> None:
    """Wait until all starts have ended, and let the service see how."""
    eventually(lambda: all(each.has_ended for each in service._starts.values()), 10)
    service._take_failures()


@pytest.mark.parametrize("reason", [UNTRUSTED, None])
def test_a_thousand_schemas_that_are_refused_keep_no_other_one_from_being_started(
    service: Any, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even if they are tried again for ever, and come first in the alphabet."""
    refused = {f"tenant_{number:04}-x": reason for number in range(1_000)}  # Kafka would take the names, our SQL not.
    if reason is None:
        refused = {schema: SETTINGS.refusal_of_schema(schema) for schema in refused}
    service._found = {**refused, "tenant_z": None}
    service._follow(0.0)
    assert list(service._harvesters) == ["tenant_z"]
    assert len(service._schedule.failed) == len(caplog.records) == len(refused)
    service._follow(1.0)
    assert len(caplog.records) == len(refused)
    let_starts_end(service)


def test_a_tenant_that_fails_again_and_again_is_logged_once(
    service: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Noted, "start_error", OSError("first"))
    service._found = {f"tenant_{number}": None for number in range(STARTS_AT_ONCE)}
    for reason, lines in (("first", STARTS_AT_ONCE), ("first", STARTS_AT_ONCE), ("second", 2 * STARTS_AT_ONCE)):
        monkeypatch.setattr(Noted, "start_error", OSError(reason))
        service._follow(threading.TIMEOUT_MAX)  # Long after the time at which they may be started again.
        let_starts_end(service)
        assert len(service._schedule.failed) == STARTS_AT_ONCE
        assert len(caplog.records) == lines
        assert reason in caplog.text


@pytest.mark.parametrize(("tenants_found", "rest_after"), [(STARTS_AT_ONCE + 2, 60.0), (MAX_AWAKE + 1, 1.0)])
def test_tenants_rest_sooner_only_where_places_are_taken(
    monkeypatch: pytest.MonkeyPatch, tenants_found: int, rest_after: float
) -> None:
    """Not where some of them merely wait for the starts of others."""
    service: Any = TenantHarvesters(SETTINGS.model_copy(update={"tenants_rest": 60.0}))
    monkeypatch.setattr(service, "_read_activity", lambda *_: ActivitySnapshot({}, {}))
    service._found = {f"tenant_{number}": None for number in range(tenants_found)}
    service._follow(0.0)
    assert service._schedule.waiting == tenants_found - STARTS_AT_ONCE
    service._poll_activity(service._rest, 0.0)
    assert service._rest._rest_after == rest_after
    eventually(lambda: service._reading.has_ended, 10)
    let_starts_end(service)


@pytest.fixture
def rested() -> Any:
    """A service with two tenants, of which one has been harvested and rests."""
    service: Any = TenantHarvesters(SETTINGS.model_copy(update={"tenants_rest": 60.0}))
    service._found = {"tenant_a": None, "tenant_b": None}
    service._follow(0.0)
    let_starts_end(service)
    service._rest.follow(["tenant_a"])  # It counts as being at rest until its activity is read.
    return service


def test_the_harvester_of_a_tenant_that_wakes_is_restarted(rested: Any) -> None:
    last = rested._harvesters["tenant_a"]
    rested._follow(1.0)
    assert list(rested._harvesters) == ["tenant_b"]
    rested._rest.follow([])
    rested._follow(2.0)
    assert rested._harvesters["tenant_a"].restarts is last
    let_starts_end(rested)


def test_a_tenant_that_failed_or_was_away_is_checked_anew(rested: Any) -> None:
    rested._follow(1.0)
    rested._found = {"tenant_b": None}
    rested._follow(2.0)  # `tenant_a` is gone.
    rested._rest.follow([])
    rested._harvesters["tenant_b"].error = OSError("ended by itself")
    rested._take_failures()
    rested._found = {"tenant_a": None, "tenant_b": None}
    rested._follow(threading.TIMEOUT_MAX)
    assert [each.restarts for each in rested._harvesters.values()] == [None, None]
    let_starts_end(rested)


def finished(error_type: str | None, reason: str | None = "why") -> TermFinished:
    return TermFinished(0, "leader", reason, error_type)


def test_a_tenant_that_may_not_be_led_has_failed(service: Any) -> None:
    """The others are told of a lost connection by the status alone: their harvesters go on."""
    service._found = {"tenant_a": None, "tenant_b": None, "tenant_c": None}
    service._follow(0.0)
    let_starts_end(service)
    ends = {"tenant_a": "ProgressLost", "tenant_b": "StoreUnavailable", "tenant_c": None}
    for schema, error_type in ends.items():
        service._harvesters[schema].observe(finished(error_type))
    last = service._harvesters["tenant_a"]
    assert service._check_now.is_set()
    service._take_failures()
    assert service._schedule.failed == ("tenant_a",)
    assert list(service._harvesters) == ["tenant_b", "tenant_c"]
    last.observe(finished("ProgressLost"))  # While it stops.
    service._follow(threading.TIMEOUT_MAX)
    let_starts_end(service)
    assert (service._schedule.failed, service._harvesters["tenant_a"].restarts) == ((), None)


def test_what_a_stopped_harvester_meets_late_does_not_fail_its_restart(rested: Any) -> None:
    """Its stop may take seconds, and a tenant may be woken meanwhile."""
    last = rested._harvesters["tenant_a"]
    rested._follow(1.0)
    rested._rest.follow([])
    rested._follow(2.0)
    restarted = rested._harvesters["tenant_a"]
    last.observe(finished("ProgressLost"))
    let_starts_end(rested)
    assert (rested._schedule.failed, rested._harvesters["tenant_a"]) == ((), restarted)
    restarted.observe(finished("ProgressLost"))
    rested._take_failures()
    assert rested._schedule.failed == ("tenant_a",)


def test_an_exception_while_a_harvester_is_stopped_is_logged(
    service: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service._found = {"tenant_a": None, "tenant_b": None}
    service._follow(0.0)
    let_starts_end(service)
    monkeypatch.setattr(Noted, "stop_error", ValueError("a fault"))
    service._found = {"tenant_b": None}
    service._follow(0.0)
    service._stop_all()
    errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert sorted(errors) == [
        f"schema tenant_{each}: its harvester did not stop as it should: unexpected: ValueError('a fault')"
        for each in "ab"
    ]


def test_a_stop_does_not_wait_for_a_search_that_hangs(
    service: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    found: list[dict[str, None]] = [{"tenant_a": None}, {"tenant_b": None}]

    def search(*_: object) -> dict[str, None]:
        if len(found) == 1:
            hangs.set()
            assert goes_on.wait(60 * PATIENCE)
        return found.pop(0)

    monkeypatch.setattr(service, "_schemas", search)
    monkeypatch.setattr(tenants, "SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(tenants, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(tenants, "CHECK_SECONDS", 0.01)
    service.start()
    try:
        assert hangs.wait(10 * PATIENCE)
        eventually(lambda: service._search_error == "Postgres does not answer", 10)
        service.stop()
        assert not goes_on.is_set()
        assert caplog.text.count("the schemas cannot be looked up: Postgres does not answer") == 1
    finally:
        goes_on.set()
        service.stop()


def test_a_search_for_which_no_thread_can_be_started_is_repeated(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(service, "_schemas", lambda: {"tenant_a": None})
    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", refuse)
        service._find_schemas(10.0)
    assert service._search_error == "can't start new thread"
    service._find_schemas(20.0)
    eventually(lambda: service._search.has_ended, 10)
    service._find_schemas(20.1)
    assert (service._found, service._search_error) == ({"tenant_a": None}, None)


def test_a_tenant_is_woken_as_soon_as_a_look_shows_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only at the next check. The next look waits for that."""
    service: Any = TenantHarvesters(SETTINGS.model_copy(update={"tenants_rest": 60.0}))
    begun, goes_on = threading.Semaphore(0), threading.Event()

    def look(*_: object) -> ActivitySnapshot:
        begun.release()
        assert goes_on.wait(60 * PATIENCE)
        return ActivitySnapshot({"tenant_a": OutboxActivity("1", is_writing=False)}, {"tenant_a": True})

    monkeypatch.setattr(service, "_schemas", lambda: {"tenant_a": None})
    monkeypatch.setattr(service, "_read_activity", look)
    monkeypatch.setattr(tenants, "CHECK_SECONDS", 0.01)
    waits, wait = list[float](), threading.Event.wait

    def recorded_wait(seconds: float) -> bool:
        waits.append(seconds)
        return wait(service._check_now, seconds)

    monkeypatch.setattr(service._check_now, "wait", recorded_wait)
    service.start()
    try:
        assert begun.acquire(timeout=10 * PATIENCE)
        monkeypatch.setattr(tenants, "CHECK_SECONDS", 600.0)
        eventually(lambda: waits[-1] == 600.0, 10)
        goes_on.set()
        eventually(lambda: list(service._harvesters) == ["tenant_a"], 10)
        assert not begun.acquire(timeout=0.2)
        service.stop()  # Does not wait for the next check either.
    finally:
        goes_on.set()
        monkeypatch.setattr(tenants, "CHECK_SECONDS", 0.01)
        service.stop()


def test_a_tenant_is_adopted_once() -> None:
    """What is lost later is not adopted without anybody asking for it."""
    service: Any = TenantHarvesters(SETTINGS, adopt=True)
    service._found = {"tenant_a": None, "tenant_b": None}
    service._follow(0.0)
    let_starts_end(service)
    service._harvesters["tenant_a"].observe(TermBegan(0, "leader", 0, 1))
    for harvester in list(service._harvesters.values()):
        harvester.observe(finished("ProgressLost"))
    service._take_failures()
    service._follow(threading.TIMEOUT_MAX)
    assert {schema: each.adopt for schema, each in service._harvesters.items()} == {"tenant_a": False, "tenant_b": True}
    let_starts_end(service)
