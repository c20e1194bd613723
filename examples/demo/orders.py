"""The orders that the demo sends: always the same, so that every sum is known in advance."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from turbopump import Message, Producer, by_hash

TOPIC = "orders"
CUSTOMERS = 200
COUNTRIES = ("CN", "DE", "FR", "US")
FAILS_ONCE_EVERY = 40
FAILS_ALWAYS_EVERY = 250


@dataclass(frozen=True, slots=True)
class Order:
    """One order; ``nth`` numbers the orders of its customer, which must be handled in order."""

    number: int
    customer: str
    nth: int
    country: str
    cents: int

    @property
    def key(self) -> str:
        return f"order-{self.number}"

    @property
    def fails_always(self) -> bool:
        """Whether billing cannot handle it until the bug is fixed."""
        return self.number % FAILS_ALWAYS_EVERY == 0

    @property
    def fails_once(self) -> bool:
        """Whether billing succeeds on the second attempt."""
        return self.number % FAILS_ONCE_EVERY == 0 and not self.fails_always

    def message(self) -> Message:
        body = {
            "number": self.number,
            "customer": self.customer,
            "nth": self.nth,
            "country": self.country,
            "cents": self.cents,
        }
        return Message(TOPIC, json.dumps(body).encode(), tags=self.country, keys=[self.key])


def order_of(body: bytes) -> Order:
    """Decode the order in a message."""
    return Order(**json.loads(body))


def make_orders(count: int) -> Iterator[Order]:
    """Generate the first ``count`` orders."""
    chance = Random(42)
    seen = dict.fromkeys(range(CUSTOMERS), 0)
    for number in range(1, count + 1):
        customer = chance.randrange(CUSTOMERS)
        seen[customer] += 1
        yield Order(
            number,
            f"customer-{customer}",
            seen[customer],
            COUNTRIES[customer % len(COUNTRIES)],
            chance.randrange(100, 20_000),
        )


def send_orders(
    nameserver: str, orders: Sequence[Order], per_second: int, on_sent: Callable[[int], None]
) -> None:
    """Send orders at a rate, all of a customer to one queue; return when all are stored."""
    with Producer("shop", nameserver=nameserver) as producer:
        started = time.perf_counter()
        promises = []
        for number, order in enumerate(orders):
            ahead_s = number / per_second - (time.perf_counter() - started)
            if ahead_s > 0:
                time.sleep(ahead_s)
            promise = producer.submit(order.message(), to=by_hash(order.customer))
            promise.add_done_callback(lambda done: on_sent(1) if done.exception() is None else None)
            promises.append(promise)
        for promise in promises:
            promise.result()
