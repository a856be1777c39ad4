"""A Spark session that files share, a table for effects, and brokers that differ from that of all tests."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from outbox_plugin import Settings
from outbox_plugin.embedded.java import spark_java_home
from outbox_plugin.embedded.kafka import EmbeddedKafka
from outbox_plugin.spark.session import spark_session
from tests.inbox_support import make_effect_table
from tests.partition_truncation import KafkaToCut
from tests.processes import launched
from tests.support import begins_with_shared_spark
from tests.tls_servers import SecuredKafka


class SharedSpark:
    """At most one Spark session. Starting its JVM costs more processor time than most files spend in it."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._session: SparkSession | None = None

    def session(self) -> SparkSession:
        """Return the session, started if there is none. A task may be tried four times, as on a cluster."""
        if self._session is None:
            conf = {"spark.sql.shuffle.partitions": "4"}
            self._session = self._running.enter_context(
                spark_session("local[2,4]", conf=conf, java_home=str(spark_java_home()))
            )
        return self._session

    def end(self) -> None:
        """End the session, if there is one."""
        self._session = None
        self._running.close()


SHARED = SharedSpark()


@pytest.fixture
def ready(settings: Settings) -> Settings:
    """Settings for a database with a table for effects."""
    make_effect_table(settings)
    return settings


class KafkaToPause(EmbeddedKafka):
    """A broker that stays registered while its process is stopped.

    A lone broker that must register again, after nine seconds by default, tells its clients that there are no brokers.
    librdkafka 2.16 has aborted a process then.
    """

    def properties(self, port: int, data: str) -> str:
        return super().properties(port, data) + "broker.session.timeout.ms=120000\n"


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[EmbeddedKafka]:
    """A broker of the test's own, which may be paused."""
    kafka = KafkaToPause(tmp_path / "kafka", print)
    with launched(kafka):
        yield kafka


@pytest.fixture(scope="session")
def _spark_ends(_nothing_is_left_behind: None) -> Iterator[None]:
    """Ends the session when a run is broken off, too."""
    yield
    SHARED.end()


@pytest.fixture(scope="module")
def spark(_spark_ends: None) -> Iterator[SparkSession]:
    """The session that a file shares with the next one, if that begins with it.

    A file that leaves a stream running fails. The next one then gets a new session, as it does where the JVM is dead.
    """
    session = SHARED.session()
    yield session
    try:
        running = [str(stream.id) for stream in session.streams.active]
        session.catalog.clearCache()
        assert not running
    except BaseException:
        SHARED.end()
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """End the session before a file that does not begin with it, which may start another one."""
    try:
        return (yield)
    finally:
        same_file = nextitem is not None and nextitem.path == item.path
        if not same_file and not (nextitem is not None and begins_with_shared_spark(nextitem)):
            SHARED.end()


class StrictKafka(EmbeddedKafka):
    """A broker that makes no topics on first use."""

    def properties(self, port: int, data: str) -> str:
        return (
            super().properties(port, data).replace("auto.create.topics.enable=true", "auto.create.topics.enable=false")
        )


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    kafka = StrictKafka(tmp_path_factory.mktemp("strict"), print)
    with launched(kafka):
        yield kafka.bootstrap_servers


@pytest.fixture(scope="module")
def kafka_to_cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaToCut]:
    """A broker of the module's own, whose partitions can be cut."""
    kafka = KafkaToCut(tmp_path_factory.mktemp("cut"), print)
    with launched(kafka):
        yield kafka


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    """A broker of the module's own, with TLS, users and ACLs."""
    kafka = SecuredKafka(tmp_path_factory.mktemp("secured"))
    with launched(kafka):
        yield kafka
