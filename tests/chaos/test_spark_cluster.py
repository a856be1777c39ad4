"""A standalone Spark master and two workers, with the package shipped as the docs say: each row is there once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import psycopg
import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox_plugin import Settings
from outbox_plugin.embedded.java import spark_java_home
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark import OutboxWrite
from outbox_plugin.spark.evaluate_once import EvaluationLost
from outbox_plugin.spark.session import spark_session
from tests.processes import kill_tree
from tests.spark_support import count, events_of, numbers, outbox_rows
from tests.support import PATIENCE, eventually

pytestmark = [pytest.mark.chaos, pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1800)]

CHECKOUT = Path(__file__).resolve().parents[2]
ROWS = 2_000


class Cluster:
    """A master and workers, each on an address of its own, so that a task is speculated away from a slow one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[psutil.Popen] = []
        log = self._start("master", "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0")
        eventually(lambda: re.search(r"spark://127\.0\.0\.1:\d+", log.read_text()), 60)
        found = re.search(r"spark://127\.0\.0\.1:\d+", log.read_text())
        self.address = found.group() if found else ""
        self.workers = [self.add_worker(number) for number in (1, 2)]

    def add_worker(self, number: int) -> psutil.Popen:
        folder = str(self._folder / "work")
        place = ("--host", f"127.0.0.{number}", "--cores", "1", "--memory", "1g", "--work-dir", folder)
        log = self._start(f"worker-{number}", "org.apache.spark.deploy.worker.Worker", *place, self.address)
        worker = self._processes[-1]
        eventually(lambda: "Successfully registered with master" in log.read_text(), 60)
        return worker

    def _start(self, name: str, main: str, *arguments: str) -> Path:
        home = Path(str(pyspark.__file__)).parent
        log = self._folder / f"{name}.log"
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "JAVA_HOME": str(spark_java_home()),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
        }
        command = [str(home / "bin" / "spark-class"), main, "--webui-port", "0", *arguments]
        with log.open("ab") as output:
            self._processes.append(psutil.Popen(command, env=environment, stdout=output, stderr=output))
        return log

    def kill(self, process: psutil.Popen) -> None:
        """A machine that is lost: the worker, its executors and their Pythons."""
        kill_tree(process)
        process.wait(90)

    def stop(self) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                self.kill(process)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as opened:
        running = Cluster(tmp_path_factory.mktemp("cluster"))
        opened.callback(running.stop)
        yield running


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python as on a worker: what the package needs is there, the package is not."""
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    [site] = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # Its own .pth files do not count.
    command = [str(python), "-c", "import psycopg, pyarrow, outbox_plugin"]
    missing = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert "No module named 'outbox_plugin'" in missing.stderr
    return python


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as an archive, made as the docs say, but without what it needs."""
    folder = tmp_path_factory.mktemp("shipped")
    pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", folder / "packages", CHECKOUT], check=True, cwd=folder)
    archive = folder / "packages.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder / "packages", arcname=".")
    return archive


@pytest.fixture(scope="module")
def spark(cluster: Cluster, bare_python: Path, shipped: Path) -> Iterator[SparkSession]:
    conf = {
        "spark.archives": f"{shipped}#packages",
        "spark.executorEnv.PYTHONPATH": "./packages",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.speculation": "true",
        "spark.speculation.interval": "200ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.minTaskRuntime": "1s",
    }
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        patch.setenv("PYTHONPATH", str(CHECKOUT))  # The driver has the package installed.
        patch.setenv("PYSPARK_PYTHON", str(bare_python))
        patch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
        session = spark_session(cluster.address, conf=conf, java_home=str(spark_java_home()))
        yield opened.enter_context(session)


@pytest.fixture
def settings(dsn: str) -> Settings:
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    migrate(settings)
    return settings


def save(settings: Settings, events: DataFrame) -> None:
    options = {"dsn": settings.dsn.get_secret_value(), "topic": "t", "orderBy": "number"}
    events.write.format("outbox").options(**options).mode("append").save()


def lingering(rows: DataFrame, folder: Path, tasks: int, seconds: float) -> DataFrame:
    """`rows`, but the first `tasks` attempts pass all of their own on, and then take `seconds` to end."""

    def linger(batches: Iterator[object]) -> Iterator[object]:
        begun = len(list(folder.iterdir()))
        (folder / str(time.time_ns())).touch()
        yield from batches
        if begun < tasks:
            time.sleep(seconds)

    return rows.mapInArrow(linger, rows.schema)


def everything_is_there_once(settings: Settings) -> bool:
    keys = [key for key, *_ in outbox_rows(settings)]
    return keys == [f"key-{number % 10}" for number in range(ROWS)]


def test_a_task_that_is_slow_is_speculated_and_counts_once(
    spark: SparkSession, settings: Settings, tmp_path: Path
) -> None:
    began = time.monotonic()
    save(settings, lingering(events_of(numbers(spark, ROWS)), tmp_path, 1, 300 * PATIENCE))
    assert time.monotonic() - began < 300 * PATIENCE
    assert len(list(tmp_path.iterdir())) == 5  # Four tasks, of which one was tried twice.
    assert everything_is_there_once(settings)


def test_a_worker_that_is_killed_while_its_task_stages(
    spark: SparkSession, cluster: Cluster, settings: Settings, tmp_path: Path
) -> None:
    events = lingering(events_of(numbers(spark, ROWS, partitions=2)), tmp_path, 2, 5 * PATIENCE)

    def kill_when_both_stage() -> None:
        eventually(lambda: len(list(tmp_path.iterdir())) == 2, 120)
        cluster.kill(cluster.workers[1])

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_when_both_stage)
        save(settings, events)
        killed.result()
    assert len(list(tmp_path.iterdir())) == 3  # Of its two tasks, one was tried again.
    assert count(settings, "outbox") == ROWS
    assert everything_is_there_once(settings)


def test_an_executor_that_is_killed_with_what_a_row_and_its_event_are_made_of(
    spark: SparkSession, cluster: Cluster, settings: Settings, tmp_path: Path
) -> None:
    """Its part is not evaluated again, since rows that are staged already have the former values."""
    worker = cluster.add_worker(3)
    known = spark.sparkContext._jsc.sc().getExecutorMemoryStatus
    executors = 1 + sum(each.is_running() for each in cluster.workers)
    eventually(lambda: known().size() == 1 + executors, 120)  # The driver counts too.
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("CREATE TABLE business (number BIGINT, drawn TEXT)")
    (made, staged) = (tmp_path / "made", tmp_path / "staged")
    made.mkdir()
    staged.mkdir()
    numbered = spark.range(0, ROWS, 1, executors).select(f.col("id").alias("number"), f.expr("uuid()").alias("drawn"))
    rows = lingering(numbered, made, executors, 5 * PATIENCE)  # So that each executor holds a part of them.
    events = rows.selectExpr("cast(number AS string) AS key", "drawn AS value")

    def kill_when_events_are_staged() -> None:
        eventually(lambda: len(list(staged.iterdir())) >= executors, 120)
        cluster.kill(worker)

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_when_events_are_staged)
        write = OutboxWrite(settings).table(rows, "business")
        with pytest.raises(EvaluationLost, match="run the job again"):
            write.events(lingering(events, staged, executors, 5 * PATIENCE), topic="t").commit()
        killed.result()
    assert (count(settings, "business"), count(settings, "outbox")) == (0, 0)
