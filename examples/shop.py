"""A web application at both ends of the wire: a POST changes data and emits, a handler reacts, all in one process.

    outbox dev &                      # prints OUTBOX_DSN and OUTBOX_BOOTSTRAP_SERVERS; export them
    python -m examples.shop           # makes the tables and the topic
    uvicorn examples.shop:app --workers 2

Each worker runs a harvester, of which one leads, and an inbox; the inboxes share the topic's partitions.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel, PositiveInt

from outbox_plugin import Event, Harvester, Outbox, Settings
from outbox_plugin.inbox import Inbox, Received
from outbox_plugin.schema.migrate import migrate

Pool = AsyncConnectionPool[psycopg.AsyncConnection[TupleRow]]
TOPIC = os.environ.get("SHOP_TOPIC", "orders")
TABLES = """
CREATE TABLE IF NOT EXISTS account (
    customer TEXT   PRIMARY KEY,
    orders   BIGINT NOT NULL DEFAULT 0,
    credit   BIGINT NOT NULL CHECK (credit >= 0)
);
CREATE TABLE IF NOT EXISTS purchase (
    customer TEXT   NOT NULL,
    number   BIGINT NOT NULL,
    amount   BIGINT NOT NULL,
    event    TEXT   NOT NULL
);
CREATE TABLE IF NOT EXISTS shipment (
    id       BIGSERIAL PRIMARY KEY,
    customer TEXT      NOT NULL,
    number   BIGINT    NOT NULL,
    event    TEXT      NOT NULL
);
"""


class Order(BaseModel):
    """What a customer orders."""

    customer: str
    amount: PositiveInt


class Purchase(BaseModel):
    """What has been ordered: the customer's first, second, … purchase."""

    number: int
    amount: int


class OrderPlaced(Event):
    """A customer has ordered something."""

    topic: str = TOPIC
    type: str = "OrderPlaced"
    value: Purchase


@dataclass(frozen=True)
class Shop:
    """What a worker has open while it serves."""

    pool: Pool
    harvester: Harvester
    inbox: Inbox


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Relay and handle events for as long as the worker serves."""
    settings = Settings()
    pool: Pool = AsyncConnectionPool(settings.dsn.get_secret_value(), open=False)
    async with (
        pool,
        Harvester(settings) as harvester,
        Inbox(settings, group="shipping", topics=[TOPIC], handler=ship) as inbox,
    ):
        app.state.shop = Shop(pool, harvester, inbox)
        yield


async def ship(connection: psycopg.AsyncConnection[Any], event: Received) -> None:
    """React to an order; the shipment and the memory of the event are one transaction."""
    purchase = Purchase.model_validate(event.json())
    await connection.execute(
        "INSERT INTO shipment (customer, number, event) VALUES (%s, %s, %s)",
        (event.key_text, purchase.number, event.idempotency_key),
    )


def opened(request: Request) -> Shop:
    """The shop that this worker has open."""
    shop: Shop = request.app.state.shop
    return shop


app = FastAPI(lifespan=lifespan)
outbox = Outbox()
OpenedShop = Annotated[Shop, Depends(opened)]


@app.post("/orders", status_code=201)
async def order(wanted: Order, shop: OpenedShop) -> Purchase:
    """Take an order: account, purchase and event are one transaction. 409 where the credit is used up."""
    try:
        async with shop.pool.connection() as connection, outbox.listener(connection) as listener:
            cursor = await connection.execute(
                "UPDATE account SET orders = orders + 1 WHERE customer = %s RETURNING orders", (wanted.customer,)
            )
            if (row := await cursor.fetchone()) is None:
                raise HTTPException(404, f"there is no customer {wanted.customer}")
            purchase = Purchase(number=row[0], amount=wanted.amount)
            placed = OrderPlaced(key=wanted.customer, value=purchase)
            listener.occurred(placed)
            await connection.execute(
                "INSERT INTO purchase VALUES (%s, %s, %s, %s)",
                (wanted.customer, purchase.number, purchase.amount, str(placed.idempotency_key)),
            )
            await connection.execute(
                "UPDATE account SET credit = credit - %s WHERE customer = %s", (wanted.amount, wanted.customer)
            )
    except psycopg.errors.CheckViolation:
        raise HTTPException(409, "the credit is used up") from None
    return purchase


@app.get("/ready")
async def ready(shop: OpenedShop, response: Response) -> dict[str, bool]:
    """200 while this worker relays and handles, 503 when one of the two has ended."""
    found = {"harvester": shop.harvester.alive, "inbox": shop.inbox.alive}
    if not all(found.values()):
        response.status_code = 503
    return found


def prepare(settings: Settings) -> None:
    """Make the tables and the topic; does nothing where they are."""
    migrate(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(TABLES)
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers, **settings.kafka})
    if TOPIC not in admin.list_topics(timeout=10).topics:
        for future in admin.create_topics([NewTopic(TOPIC, num_partitions=6)]).values():
            future.result(20)


if __name__ == "__main__":
    prepare(Settings())
