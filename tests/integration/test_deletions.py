"""A table whose rows cannot be deleted, or marked: each is published once, the rest waits, and the reason is said."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest
from psycopg import sql

from outbox_plugin import Harvester, Settings
from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.errors import SchemaMissing
from outbox_plugin.relay.events import HarvestEvent, TermFinished
from outbox_plugin.status.reader import read_status
from tests.harvesting import backlog, by_key, consume, drained, insert
from tests.roles import as_role, let_in
from tests.support import eventually

pytestmark = pytest.mark.integration

KEEP_ROWS = """CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER keep BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION keep()"""
KEEP_ROWS_BY_POLICY = """ALTER TABLE outbox ENABLE ROW LEVEL SECURITY;
CREATE POLICY everything ON outbox FOR ALL USING (true);
CREATE POLICY but_deletions ON outbox AS RESTRICTIVE FOR DELETE USING (kafka_key = 'no key')"""
REFUSE_DELETIONS = """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'not now'; END $$;
CREATE TRIGGER refuse BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION refuse()"""
MANY = 20_000  # Rows before the one that is to be found.
LET_GO = {
    KEEP_ROWS: "DROP TRIGGER keep ON outbox",
    KEEP_ROWS_BY_POLICY: "ALTER TABLE outbox DISABLE ROW LEVEL SECURITY",
}
LET_NOBODY_DELETE = """ALTER TABLE outbox ENABLE ROW LEVEL SECURITY;
CREATE POLICY readers ON outbox FOR SELECT USING (true);
CREATE POLICY others ON outbox FOR DELETE TO pg_monitor USING (true)"""
LET_NOBODY_READ = """ALTER TABLE outbox ENABLE ROW LEVEL SECURITY;
CREATE POLICY deletions ON outbox FOR DELETE USING (true)"""
DELETE_NOTHING = "CREATE RULE keep AS ON DELETE TO outbox DO INSTEAD NOTHING"
LEAVE_ROWS = """CREATE FUNCTION leave() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN IF {which} THEN RETURN {what}; END IF; RETURN NEW; END $$;
CREATE TRIGGER leave BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION leave()"""
FIRST_ROW, EACH_ROW = "OLD.kafka_key = 'a' AND OLD.kafka_value = '1'", "true"
LEAVE_FIRST_ROW_BY_POLICY = """ALTER TABLE outbox ENABLE ROW LEVEL SECURITY;
CREATE POLICY everything ON outbox FOR ALL USING (true);
CREATE POLICY but_the_first ON outbox AS RESTRICTIVE FOR UPDATE USING (kafka_key <> 'a' OR kafka_value <> '1')"""
LET_MARK = "DROP TRIGGER IF EXISTS leave ON outbox; ALTER TABLE outbox DISABLE ROW LEVEL SECURITY"


@pytest.fixture
def harvester_role(settings: Settings) -> Iterator[Settings]:
    """Settings of a role that owns nothing: policies apply to it."""
    role, dsn = f"harvester_{uuid.uuid4().hex[:8]}", settings.dsn.get_secret_value()
    with psycopg.connect(dsn) as connection:
        for query in (
            "CREATE ROLE {} LOGIN",
            "GRANT ALL ON ALL TABLES IN SCHEMA public TO {}",
            "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {}",
        ):
            connection.execute(sql.SQL(query).format(sql.Identifier(role)))
    let_in(dsn, role)
    yield Settings(**{**settings.model_dump(), "dsn": as_role(dsn, role)})
    with psycopg.connect(dsn) as connection:
        connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def run(settings: Settings, query: str) -> None:
    """As the table's owner."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(query.encode())


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
@pytest.mark.parametrize("prevent", LET_GO, ids=["trigger", "policy"])
def test_rows_that_cannot_be_deleted_are_published_once_and_hold_the_rest_back(
    settings: Settings, harvester_role: Settings, topic: str, delivery: Delivery, prevent: str
) -> None:
    harvester = harvester_role.model_copy(update={"delivery": delivery})
    run(settings, prevent)
    # At least once, a key's second record is sent after the first; a term that ends meanwhile may repeat it.
    later = [("a", "2")] if delivery == "exactly-once" else []
    insert(settings, topic, [("a", "1"), ("b", "1"), *later])
    ends: list[str | None] = []

    def observe(event: HarvestEvent) -> None:
        if isinstance(event, TermFinished):
            ends.append(event.reason)

    with Harvester(harvester, observe=observe):
        eventually(lambda: len(ends) >= 3, 60)
        insert(settings, topic, [("a", "3")])
        eventually(lambda: len(ends) >= 4, 60)
        assert all("cannot be deleted" in str(reason) and "\n" not in str(reason) for reason in ends)
        assert "cannot be deleted" in str(read_status(settings).shards[0].trouble)
        run(settings, LET_GO[prevent])
        drained(settings)
    assert by_key(consume(settings, topic)) == {"a": ["1", *(value for _, value in later), "3"], "b": ["1"]}


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_rows_that_the_history_refuses_are_published_once_and_hold_the_rest_back(
    settings: Settings, topic: str, delivery: Delivery
) -> None:
    run(settings, "ALTER TABLE outbox_history ADD CONSTRAINT no_more CHECK (kafka_key <> 'a')")
    insert(settings, topic, [("a", "1"), ("b", "1")])
    ends: list[str | None] = []

    def observe(event: HarvestEvent) -> None:
        if isinstance(event, TermFinished):
            ends.append(event.reason)

    kept = settings.model_copy(update={"delivery": delivery, "retention": timedelta(days=1)})
    with Harvester(kept, observe=observe):
        eventually(lambda: len(ends) >= 3, 60)
        insert(settings, topic, [("a", "2")])
        eventually(lambda: len(ends) >= 4, 60)
        assert all("cannot be moved to outbox_history" in str(reason) and "no_more" in str(reason) for reason in ends)
        run(settings, "ALTER TABLE outbox_history DROP CONSTRAINT no_more")
        drained(settings)
    assert by_key(consume(settings, topic)) == {"a": ["1", "2"], "b": ["1"]}
    assert kept_values(settings) == ["1", "1", "2"]


def test_a_published_row_behind_many_others_is_deleted_once_it_can_be(settings: Settings, topic: str) -> None:
    """At least once, a row that could not be deleted is never marked again: the next leader must find it."""
    insert(settings, topic, [("parked", "x" * 2_000_000)])
    run(
        settings,
        f"INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) SELECT '{topic}', 'parked', '' "
        f"FROM generate_series(1, {MANY})",
    )
    ends: list[str | None] = []

    def observe(event: HarvestEvent) -> None:
        if isinstance(event, TermFinished):
            ends.append(event.reason)

    with Harvester(settings.model_copy(update={"delivery": "at-least-once"}), observe=observe):
        eventually(lambda: read_status(settings).parked_keys == 1, 60)
        run(settings, REFUSE_DELETIONS)
        insert(settings, topic, [("a", "1")])
        eventually(lambda: len(ends) >= 2, 60)
        assert all("cannot be deleted" in str(reason) for reason in ends)
        run(settings, "DROP TRIGGER refuse ON outbox")
        eventually(lambda: backlog(settings) == 1 + MANY, 60)
    assert by_key(consume(settings, topic)) == {"a": ["1"]}


def kept_values(settings: Settings) -> list[str]:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        query = "SELECT convert_from(kafka_value, 'UTF8') FROM outbox_history ORDER BY id"
        return [value for (value,) in connection.execute(query)]


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
@pytest.mark.parametrize(
    ("prevent", "why"),
    [
        (LET_NOBODY_DELETE, "row level security"),
        (LET_NOBODY_READ, "row level security"),
        (DELETE_NOTHING, "the rule keep"),
    ],
)
def test_a_table_that_lets_nobody_delete_is_refused_at_start(
    settings: Settings, harvester_role: Settings, delivery: Delivery, prevent: str, why: str
) -> None:
    run(settings, prevent)
    with pytest.raises(SchemaMissing, match=why), Harvester(harvester_role.model_copy(update={"delivery": delivery})):
        pass


@pytest.mark.parametrize(
    "prevent",
    [
        LEAVE_ROWS.format(which=FIRST_ROW, what="NULL"),
        LEAVE_ROWS.format(which=FIRST_ROW, what="OLD"),
        LEAVE_ROWS.format(which=EACH_ROW, what="NULL"),
        LEAVE_ROWS.format(which=EACH_ROW, what="OLD"),
        LEAVE_FIRST_ROW_BY_POLICY,
    ],
    ids=[
        "the update of a row",
        "the change of a row",
        "all updates",
        "all changes",
        "the update of a row, by a policy",
    ],
)
def test_rows_that_cannot_be_marked_are_neither_overtaken_nor_repeated(
    settings: Settings, harvester_role: Settings, topic: str, prevent: str
) -> None:
    run(settings, prevent)
    insert(settings, topic, [("a", "1"), ("a", "2"), ("b", "1")])
    ends: list[str | None] = []

    def observe(event: HarvestEvent) -> None:
        if isinstance(event, TermFinished):
            ends.append(event.reason)

    with Harvester(harvester_role.model_copy(update={"delivery": "at-least-once"}), observe=observe):
        eventually(lambda: len(ends) >= 2, 60)
        assert all("can be marked" in str(reason) or "cannot be marked" in str(reason) for reason in ends)
        assert backlog(settings) == 3
        run(settings, LET_MARK)
        drained(settings)
    assert by_key(consume(settings, topic)) == {"a": ["1", "2"], "b": ["1"]}


def test_a_dead_letter_that_the_table_keeps_is_parked(settings: Settings, topic: str) -> None:
    run(settings, KEEP_ROWS)
    insert(settings, topic, [("bad", "x" * 2_000_000)])
    with Harvester(settings.model_copy(update={"bad_rows": "dead-letter"})):
        eventually(lambda: read_status(settings).parked_keys == 1, 60)
    [parked] = read_status(settings).parked
    assert "keeps it" in parked.reason
    assert read_status(settings).dead_letters == 0


def test_rows_that_a_policy_hides_from_a_leader_are_neither_repeated_nor_overtaken(
    settings: Settings, harvester_role: Settings, topic: str
) -> None:
    """Where nobody has made a policy, row level security hides all rows: they must not be taken for deleted ones."""
    with Harvester(harvester_role):
        insert(settings, topic, [("a", "1")])
        drained(settings)
        run(settings, "ALTER TABLE outbox ENABLE ROW LEVEL SECURITY")
        insert(settings, topic, [("a", "2")])
        eventually(lambda: "row level security" in str(read_status(settings).shards[0].trouble), 60)
        insert(settings, topic, [("a", "3")])
        run(settings, "CREATE POLICY everything ON outbox USING (true)")
        drained(settings)
        run(settings, "DROP POLICY everything ON outbox; ALTER TABLE outbox DISABLE ROW LEVEL SECURITY")
        insert(settings, topic, [("a", "4")])
        drained(settings)
    assert by_key(consume(settings, topic)) == {"a": ["1", "2", "3", "4"]}
