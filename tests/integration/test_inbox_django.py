"""Handlers that use Django's models: each event's effect once, whatever they do to their database."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.apps import apps
from django.db import IntegrityError, InterfaceError, NotSupportedError, connections, models, transaction
from django.db.backends.postgresql.base import DatabaseWrapper
from django.db.transaction import TransactionManagementError
from psycopg.rows import dict_row
from psycopg.types import TypeInfo
from psycopg.types.json import Jsonb
from psycopg.types.string import ByteaLoader

from outbox_plugin import Event, Outbox, Settings
from outbox_plugin.errors import HandlerMisuse
from outbox_plugin.inbox import Received
from outbox_plugin.inbox.django import database_of
from tests.emit_connections import django_alias
from tests.inbox_handlers import GUILTY, Misuse, check_effects, effects, handle_all, name
from tests.inbox_support import query

pytestmark = pytest.mark.integration

NOON = datetime.datetime(2026, 7, 1, 12, tzinfo=datetime.UTC)


@pytest.fixture
def ready(settings: Settings) -> Settings:
    query(
        settings,
        "CREATE TABLE order_effect "
        "(id BIGSERIAL PRIMARY KEY, event TEXT NOT NULL, at TIMESTAMPTZ, day DATE, content JSONB)",
    )
    return settings


@pytest.fixture
def alias(ready: Settings) -> Iterator[str]:
    """A database of Django's that no model could reach: what works, works on the handler's connection."""
    alias = django_alias("host=127.0.0.1 port=1 dbname=nowhere")
    yield alias
    assert connections[alias].connection is None


@pytest.fixture
def connection(ready: Settings) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(ready.dsn.get_secret_value()) as connection:
        yield connection


def effect() -> Any:
    """The model. It is made once Django is set up."""
    if "effect" in apps.all_models["orders"]:
        return apps.all_models["orders"]["effect"]

    class Effect(models.Model):  # type: ignore[misc]
        event = models.TextField()
        at = models.DateTimeField(null=True)
        day = models.DateField(null=True)
        content = models.JSONField(null=True)

        class Meta:
            app_label = "orders"
            db_table = "order_effect"

    return Effect


def test_each_event_has_its_effect_once(ready: Settings, alias: str, topic: str, group: str) -> None:
    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        """A guilty event fails once it has written."""
        written = effect().objects.using(alias)
        with database_of(connection, alias):
            with contextlib.suppress(Misuse), transaction.atomic(using=alias):
                written.create(event=f"{name(event)} undone")
                raise Misuse
            written.create(event=name(event))
            with contextlib.suppress(IntegrityError), transaction.atomic(using=alias):
                written.create(event=None)
            Outbox().emit(connections[alias], Event(topic="t", key=name(event), value="{}"))
            if event.value == b"guilty":
                raise Misuse
        assert connection._notice_handlers == []

    sent = handle_all(ready, topic, group, handle)
    check_effects(ready, sent)


def test_a_connection_that_a_model_loses_does_not_count_as_its_events_failure(
    ready: Settings, alias: str, topic: str, group: str
) -> None:
    lost = set[str]()

    def lose_it_once(connection: psycopg.Connection[Any], event: Received) -> None:
        with database_of(connection, alias):
            effect().objects.using(alias).create(event=name(event))
            if event.value == b"guilty" and name(event) not in lost:
                lost.add(name(event))
                with connections[alias].cursor() as cursor:
                    cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    sent = handle_all(ready, topic, group, lose_it_once, 60)
    assert effects(ready) == sorted(sent)
    assert len(lost) == len(GUILTY)


def test_what_a_block_has_written_is_undone_by_an_exception_that_leaves_it(
    connection: psycopg.Connection[Any], alias: str
) -> None:
    written = effect().objects.using(alias)
    with database_of(connection, alias):
        written.create(event="kept")
        with contextlib.suppress(Misuse), database_of(connection, alias):
            written.create(event="undone")
            raise Misuse
    with contextlib.suppress(Misuse), database_of(connection, alias):
        written.create(event="undone, too")
        raise Misuse
    assert connection.execute("SELECT event FROM order_effect").fetchall() == [("kept",)]


def caught_error(written: Any) -> None:
    with contextlib.suppress(IntegrityError):
        written.create(event=None)


def asked_to_roll_back(written: Any) -> None:
    written.create(event="undone")
    transaction.set_rollback(True, using=written.db)


def closed(written: Any) -> None:
    written.create(event="undone")
    connections[written.db].close()


@pytest.mark.parametrize("harm", [caught_error, asked_to_roll_back, closed])
def test_what_django_would_roll_back_fails_the_event(
    connection: psycopg.Connection[Any], alias: str, harm: Any
) -> None:
    with pytest.raises(TransactionManagementError), database_of(connection, alias):  # noqa: PT012
        effect().objects.using(alias).create(event="undone")
        harm(effect().objects.using(alias))
    assert connection.execute("SELECT event FROM order_effect").fetchall() == []


def commit(alias: str) -> None:
    connections[alias].commit()


def set_autocommit(alias: str) -> None:
    transaction.set_autocommit(True, using=alias)


def durable(alias: str) -> None:
    with transaction.atomic(using=alias, durable=True):
        pass


def on_commit(alias: str) -> None:
    transaction.on_commit(lambda: None, using=alias)


def commit_by_psycopg(alias: str) -> None:
    connections[alias].connection.commit()


def roll_back_by_psycopg(alias: str) -> None:
    connections[alias].connection.rollback()


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (commit, TransactionManagementError),
        (commit_by_psycopg, psycopg.ProgrammingError),
        (roll_back_by_psycopg, psycopg.ProgrammingError),
        (set_autocommit, TransactionManagementError),
        (durable, RuntimeError),
        (on_commit, NotSupportedError),
    ],
)
def test_the_transaction_is_not_djangos_to_end(
    connection: psycopg.Connection[Any], alias: str, end: Any, error: type[Exception]
) -> None:
    with pytest.raises(error), database_of(connection, alias):
        end(alias)
    assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo"])
def test_values_are_those_that_django_reads_on_its_own_connection(
    ready: Settings, connection: psycopg.Connection[Any], zone: str
) -> None:
    own = django_alias(ready.dsn.get_secret_value())
    kept = {"event": "é %", "at": NOON, "day": NOON.date(), "content": {"a": [1, None, "é"]}}
    connection.execute("SELECT set_config('TimeZone', %s, false)", [zone])
    connection.row_factory = dict_row
    names = list(kept)
    try:
        with database_of(connection, own):
            effect().objects.using(own).create(**kept)
            assert list(effect().objects.using(own).values(*names)) == [kept]
            assert list(effect().objects.using(own).values(*names).iterator()) == [kept]
            assert effect().objects.using(own).filter(at__date=NOON.date(), content__a__0=1).count() == 1
        [row] = connection.execute(
            "SELECT at, content, current_setting('TimeZone') AS zone FROM order_effect"
        ).fetchall()
        assert row == {"at": NOON, "content": kept["content"], "zone": zone}
        connection.execute("UPDATE order_effect SET content = %s", [Jsonb({"b": 1})])
        connection.commit()
        assert effect().objects.using(own).get().content == {"b": 1}
    finally:
        connections[own].close()


def test_a_pool_in_djangos_settings_is_left_alone(connection: psycopg.Connection[Any], alias: str) -> None:
    options = connections[alias].settings_dict["OPTIONS"]
    options["pool"] = True
    try:
        with pytest.raises(TransactionManagementError), database_of(connection, alias):
            closed(effect().objects.using(alias))
        assert options == {"pool": True}
    finally:
        options.clear()


def test_options_of_djangos_connection_need_not_be_copied(connection: psycopg.Connection[Any], alias: str) -> None:
    options = connections[alias].settings_dict["OPTIONS"]
    options["pool"] = {"check": threading.Lock()}  # Copying one fails.
    try:
        with database_of(connection, alias):
            effect().objects.using(alias).create(event="kept")
    finally:
        options.clear()


@pytest.fixture
def another(ready: Settings) -> str:
    """A second database of Django's."""
    return django_alias("host=127.0.0.1 port=1 dbname=nowhere")


def test_an_iterator_may_run_within_another(connection: psycopg.Connection[Any], alias: str, another: str) -> None:
    with database_of(connection, alias), database_of(connection, another):
        effect().objects.using(alias).bulk_create(effect()(event=str(number)) for number in range(3))
        pairs = []
        for outer in effect().objects.using(alias).iterator(chunk_size=1):
            pairs += [(outer.id, each.id) for each in effect().objects.using(another).iterator(chunk_size=1)]
            with database_of(connection, alias):
                pairs += [(outer.id, each.id) for each in effect().objects.using(alias).iterator(chunk_size=1)]
    assert len(pairs) == 2 * len(set(pairs)) == 18


@pytest.mark.filterwarnings("ignore:savepoint.* is deprecated")  # A later Django has another name for it.
def test_a_savepoint_of_one_alias_is_none_of_another(
    connection: psycopg.Connection[Any], alias: str, another: str
) -> None:
    with database_of(connection, alias), database_of(connection, another):
        effect().objects.using(alias).create(event="kept")
        first = transaction.savepoint(using=alias)
        effect().objects.using(alias).create(event="undone")
        transaction.savepoint(using=another)
        transaction.savepoint_rollback(first, using=alias)
    assert connection.execute("SELECT event FROM order_effect").fetchall() == [("kept",)]


def test_what_outlives_a_block_does_nothing_in_the_next_transaction(
    connection: psycopg.Connection[Any], alias: str
) -> None:
    def kept_iterator() -> Any:
        iterator = effect().objects.using(alias).iterator(chunk_size=1)
        next(iterator)
        return iterator

    with database_of(connection, alias):
        effect().objects.using(alias).bulk_create(effect()(event=str(number)) for number in range(3))
        left, collected, used = kept_iterator(), kept_iterator(), kept_iterator()
        cursor = connections[alias].cursor()
    connection.commit()
    with database_of(connection, alias):
        effect().objects.using(alias).create(event="kept")
        left.close()
        with pytest.raises(InterfaceError):
            next(used)
        with pytest.raises(InterfaceError):
            cursor.execute("DELETE FROM order_effect")
        with connection.lock:
            collected.close()  # As a collection of garbage could do during a statement.
    assert connection.execute("SELECT count(*) FROM order_effect").fetchone() == (4,)


def test_psycopgs_rollback_fails_the_event(connection: psycopg.Connection[Any], alias: str) -> None:
    with pytest.raises(HandlerMisuse, match=r"psycopg\.Rollback"), database_of(connection, alias):
        raise psycopg.Rollback


def test_psycopgs_rollback_of_a_transaction_around_undoes_that(connection: psycopg.Connection[Any], alias: str) -> None:
    def undo(outer: psycopg.Transaction) -> None:
        with database_of(connection, alias):
            effect().objects.using(alias).create(event="undone")
            raise psycopg.Rollback(outer)

    with connection.transaction() as outer:
        undo(outer)
    assert connection.execute("SELECT event FROM order_effect").fetchall() == []


def test_a_pipeline_is_refused_as_django_takes_its_unknown_counts_for_rows(
    connection: psycopg.Connection[Any], alias: str
) -> None:
    with pytest.raises(NotSupportedError, match="pipeline"), database_of(connection, alias), connection.pipeline():
        assert not effect().objects.using(alias).filter(event="missing").update(event="changed")
    with pytest.raises(NotSupportedError, match="pipeline"), connection.pipeline(), database_of(connection, alias):
        assert not effect().objects.using(alias).filter(event="missing").update(event="changed")


def test_psycopgs_cursors_are_made_as_asked_for(connection: psycopg.Connection[Any], alias: str) -> None:
    with database_of(connection, alias):
        lent = connections[alias].connection
        assert lent.cursor(row_factory=dict_row).execute("SELECT 1 AS a").fetchone() == {"a": 1}
        with lent.cursor("named", row_factory=dict_row) as cursor:
            assert cursor.execute("SELECT 1 AS a").fetchall() == [{"a": 1}]


def test_types_of_djangos_app_for_postgres_are_looked_up_on_the_handlers_connection(
    connection: psycopg.Connection[Any], alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apps, "is_installed", lambda name: name == "django.contrib.postgres")
    with database_of(connection, alias):
        effect().objects.using(alias).create(event="kept")


class EngineWithTypes(DatabaseWrapper):  # type: ignore[misc]
    """Registers types where it has connected, as GeoDjango's engine does."""

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        connection = super().get_new_connection(conn_params)
        found = TypeInfo.fetch(connection, "order_effect")
        assert found is not None
        connection.adapters.register_loader(found.oid, ByteaLoader)
        return connection


def test_an_engine_may_register_types_of_its_own(connection: psycopg.Connection[Any], alias: str) -> None:
    own = connections[alias]
    connections[alias] = EngineWithTypes(own.settings_dict, alias)
    try:
        with database_of(connection, alias), connections[alias].cursor() as cursor:
            cursor.execute("SELECT ROW(1, '', NULL, NULL, NULL)::order_effect")
            assert isinstance(cursor.fetchone()[0], bytes)
    finally:
        connections[alias] = own
    row = connection.execute("SELECT ROW(1, '', NULL, NULL, NULL)::order_effect").fetchone()
    assert row == ('(1,"",,,)',)


class Counting(psycopg.Connection[Any]):
    """Counts what it asks the server for."""

    requests = 0

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self.requests += 1
        return super().wait(*args, **kwargs)


@pytest.mark.parametrize("zone", ["UTC", "Etc/UTC"])
def test_a_block_costs_two_statements(ready: Settings, alias: str, zone: str) -> None:
    with Counting.connect(ready.dsn.get_secret_value()) as connection:
        connection.execute("SELECT set_config('TimeZone', %s, true)", [zone])
        before = connection.requests
        with database_of(connection, alias):
            effect().objects.using(alias).create(event="kept")
        assert connection.requests - before == 3


def test_an_async_connection_is_refused(ready: Settings, alias: str) -> None:
    async def handle() -> None:
        async with await psycopg.AsyncConnection.connect(ready.dsn.get_secret_value()) as connection:
            with database_of(connection, alias):  # type: ignore[arg-type]
                pass

    with pytest.raises(TypeError, match="given: a AsyncConnection"):
        asyncio.run(handle())


def test_a_database_that_is_not_postgres_is_refused(connection: psycopg.Connection[Any], alias: str) -> None:
    sqlite = connections.configure_settings({"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
    connections.settings["sqlite"] = sqlite["default"]
    with pytest.raises(TypeError, match=r"the alias 'sqlite' names one of SQLite"), database_of(connection, "sqlite"):
        pass
