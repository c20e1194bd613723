"""A web application that takes orders, and the consumer that handles them, in one process.

::

    python examples/fastapi_orders.py                                   # runs a self-test
    NAMESRV_ADDR=127.0.0.1:9876 uvicorn fastapi_orders:app      # from this directory

The lifespan starts a producer and a push consumer with the application and closes them with it:
closing waits for running listener calls, and commits. Without NAMESRV_ADDR it starts its own
cluster.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated

import httpx
from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from embedded import own_cluster
from turbopump.aio import (
    ConsumeContext,
    ConsumeResult,
    Message,
    MessageView,
    Producer,
    PushConsumer,
    TurbopumpError,
    by_hash,
)

TOPIC = "web-orders"
ORDERS = 50
WAIT_S = 30


class Order(BaseModel):
    number: int = Field(gt=0)
    customer: str = Field(min_length=1)
    cents: int = Field(gt=0)


class Accepted(BaseModel):
    number: int
    message_id: str


@dataclass
class Shop:
    """What requests and the listener share; in a real application, a database."""

    producer: Producer
    orders: dict[int, Order] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, messages: Sequence[MessageView], _: ConsumeContext) -> ConsumeResult:
        """Store orders by number, so that a redelivered message changes nothing."""
        for message in messages:
            order = Order.model_validate_json(message.body)
            self.orders[order.number] = order
        self.changed.set()
        return ConsumeResult.SUCCESS


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    given = os.environ.get("NAMESRV_ADDR")
    with nullcontext(given) if given else own_cluster() as nameserver:
        async with Producer("web", nameserver=nameserver) as producer:
            shop = app.state.shop = Shop(producer)
            async with PushConsumer(
                "web-billing",
                shop.handle,
                nameserver=nameserver,
                subscriptions={TOPIC: "created"},
                start_from="first",
            ):
                yield


app = FastAPI(title="Orders", lifespan=lifespan)


def _shop(request: Request) -> Shop:
    shop = request.app.state.shop
    assert isinstance(shop, Shop)
    return shop


TheShop = Annotated[Shop, Depends(_shop)]


@app.post("/orders", status_code=202)
async def create(order: Order, shop: TheShop) -> Accepted:
    """Respond once the broker has stored the order; it is handled soon after."""
    message = Message(
        TOPIC, order.model_dump_json().encode(), tags="created", keys=[str(order.number)]
    )
    try:
        receipt = await shop.producer.send(message, to=by_hash(order.customer))
    except TurbopumpError as error:
        raise HTTPException(503, f"not accepted: {error}") from error
    return Accepted(number=order.number, message_id=receipt.message_id)


@app.get("/orders/{number}")
async def show(number: int, shop: TheShop) -> Order:
    order = shop.orders.get(number)
    if order is None:
        raise HTTPException(404, "not handled yet, or unknown")
    return order


# --- self-test ------------------------------------------------------------------------------------


async def try_out() -> int:
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://orders") as client,
    ):
        refused = await client.post("/orders", json={"number": 0, "customer": "", "cents": 1})
        orders = [
            Order(number=number, customer=f"customer-{number % 7}", cents=100 * number)
            for number in range(1, ORDERS + 1)
        ]
        answers = await asyncio.gather(
            *(client.post("/orders", json=one.model_dump()) for one in orders)
        )
        accepted = [answer for answer in answers if answer.status_code == 202]
        async with asyncio.timeout(WAIT_S):
            await _wait_for(app.state.shop, {one.number for one in orders})
        answers = [await client.get(f"/orders/{one.number}") for one in orders]
        shown = [Order.model_validate_json(answer.content) for answer in answers]
    print(f"{len(accepted)} of {ORDERS} orders accepted, {len(shown)} handled")
    is_right = refused.status_code == 422 and len(accepted) == ORDERS and shown == orders
    return 0 if is_right else 1


async def _wait_for(shop: Shop, numbers: set[int]) -> None:
    while not numbers <= shop.orders.keys():
        shop.changed.clear()
        await shop.changed.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(try_out()))
