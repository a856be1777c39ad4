"""The shop under fire: two workers, thousands of POSTs, some of which roll back, and each worker killed in turn.

    python -m examples.end_to_end     # with the servers that OUTBOX_DSN and OUTBOX_BOOTSTRAP_SERVERS name

At the end every committed purchase must have been shipped once, in its customer's order, and nothing else. Exit code 0
only if so. The database and the topic are the run's own, and gone afterwards.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass

import click
import psutil
import psycopg
import requests
from confluent_kafka.admin import AdminClient
from psycopg import sql

from outbox_plugin import Settings

CUSTOMERS = 200
CLIENTS = 8
AMOUNT = 10
PATIENCE_SECONDS = 120
JUDGEMENT = """
WITH shipped AS (
    SELECT event, count(*) AS times FROM shipment GROUP BY event
), turns AS (
    SELECT number, row_number() OVER (PARTITION BY customer ORDER BY id) AS turn FROM shipment
)
SELECT (SELECT count(*) FROM purchase),
       (SELECT count(*) FROM shipment),
       (SELECT count(*) FROM purchase WHERE event NOT IN (SELECT event FROM shipped)),
       (SELECT count(*) FROM shipped WHERE times > 1),
       (SELECT count(*) FROM shipped WHERE event NOT IN (SELECT event FROM purchase)),
       (SELECT count(*) FROM turns WHERE number <> turn)
"""


@dataclass(frozen=True)
class Judgement:
    """Purchases that were committed and shipments at the far end, and what is wrong with them."""

    committed: int
    shipped: int
    lost: int
    repeated: int
    phantom: int
    out_of_order: int

    @property
    def is_right(self) -> bool:
        """Each committed purchase shipped once, in order, and nothing else."""
        wrong = (self.lost, self.repeated, self.phantom, self.out_of_order)
        return self.committed == self.shipped > 0 and not any(wrong)


@click.command()
@click.option("--posts", default=10_000, show_default=True, help="How many orders are placed.")
@click.option("--kills", default=4, show_default=True, help="How often a worker is killed, each in its turn.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def end_to_end(posts: int, kills: int, as_json: bool) -> None:
    """Place orders with a shop of two workers while they are killed, and judge what arrived at the far end."""
    with _own_database(Settings()) as settings:
        subprocess.run([sys.executable, "-m", "examples.shop"], env=_environment(settings), check=True)
        _open_accounts(settings, posts)
        began = time.monotonic()
        with _server(settings) as (url, server):
            killed: list[int] = []
            answers = _place_orders(url, posts, kills, server, killed)
            served = time.monotonic() - began
            judgement = _judged(settings)
        seconds = time.monotonic() - began
    figures = {
        "posts": posts,
        "answers": dict(answers),
        "killed": len(killed),
        "serving_seconds": round(served, 1),
        "seconds": round(seconds, 1),
        **asdict(judgement),
    }
    click.echo(json.dumps(figures) if as_json else "\n".join(f"{name:16} {value}" for name, value in figures.items()))
    if not judgement.is_right:
        sys.exit(1)


def _open_accounts(settings: Settings, posts: int) -> None:
    """Credit for about nine in ten of the orders: the last ones of each customer roll back."""
    credit = posts * AMOUNT * 9 // 10 // CUSTOMERS
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(
            "INSERT INTO account (customer, credit) SELECT 'customer-' || i, %s FROM generate_series(1, %s) AS i",
            (credit, CUSTOMERS),
        )


def _place_orders(url: str, posts: int, kills: int, server: subprocess.Popen[bytes], killed: list[int]) -> Counter[str]:
    """Place them all, and kill a worker after each part of them; what was answered, by status."""
    numbers = iter(range(posts))
    answers: Counter[str] = Counter()
    lock = threading.Lock()
    due = [posts * (each + 1) // (kills + 1) for each in range(kills)]

    def place() -> None:
        chance = random.Random()  # noqa: S311 - which customer orders.
        with requests.Session() as session:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                if number in due:
                    _kill_one(server, killed)
                wanted = {"customer": f"customer-{chance.randint(1, CUSTOMERS)}", "amount": AMOUNT}
                try:
                    answer = str(session.post(f"{url}/orders", json=wanted, timeout=30).status_code)
                except requests.RequestException:
                    answer = "none"  # Whether it was committed, only the database knows.
                with lock:
                    answers[answer] += 1

    with ThreadPoolExecutor(CLIENTS) as clients:
        for future in [clients.submit(place) for _ in range(CLIENTS)]:
            future.result()
    return answers


def _kill_one(server: subprocess.Popen[bytes], killed: list[int]) -> None:
    """kill -9 the worker that has lived longest; the server starts another one."""
    workers = [each for each in psutil.Process(server.pid).children() if _is_worker(each)]
    oldest = min(workers, key=lambda each: each.create_time())
    killed.append(oldest.pid)
    oldest.send_signal(signal.SIGKILL)


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # It may end meanwhile.
        return process.status() != psutil.STATUS_ZOMBIE and "spawn_main" in " ".join(process.cmdline())
    return False


def _judged(settings: Settings) -> Judgement:
    """The judgement once it is right, or what it is when patience has run out."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            [row] = connection.execute(JUDGEMENT).fetchall()
        judgement = Judgement(*row)
        if judgement.is_right or time.monotonic() > deadline:
            return judgement
        time.sleep(0.1)


@contextmanager
def _own_database(settings: Settings) -> Iterator[Settings]:
    name = f"shop_{uuid.uuid4().hex[:8]}"
    dsn = settings.dsn.get_secret_value()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            own = f"{dsn.rpartition('/')[0]}/{name}"
            yield Settings(dsn=own, bootstrap_servers=settings.bootstrap_servers, group=name, kafka=settings.kafka)
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
            admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers, **settings.kafka})
            topics = [topic for topic in admin.list_topics(timeout=10).topics if topic.startswith(name)]
            for future in admin.delete_topics(topics).values() if topics else ():
                future.result(20)


def _environment(settings: Settings) -> dict[str, str]:
    return {
        **os.environ,
        "OUTBOX_DSN": settings.dsn.get_secret_value(),
        "OUTBOX_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "OUTBOX_GROUP": settings.group,
        "SHOP_TOPIC": f"{settings.group}-orders",
    }


@contextmanager
def _server(settings: Settings) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The shop, served by two workers until the end; its address, and its process."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "examples.shop:app", "--workers", "2", "--port", str(port)]
    command += ["--log-level", "warning", "--no-access-log", "--timeout-worker-healthcheck", "60"]
    server = subprocess.Popen(command, env=_environment(settings))
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url)
        yield url, server
    finally:
        server.terminate()
        server.wait(60)


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            if requests.get(f"{url}/ready", timeout=5).ok:
                return
        except requests.RequestException:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"the shop was not ready in {PATIENCE_SECONDS} s")
        time.sleep(0.1)


if __name__ == "__main__":
    end_to_end()
