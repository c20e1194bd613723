"""Decorated functions: typed bodies in, results out, one message per call."""

from __future__ import annotations

import sys
import threading

import msgspec

from embedded import cluster
from turbopump import Message, Producer, Worker, consumer

ORDERS = 10


class Order(msgspec.Struct):
    """What customers send."""

    number: int
    amount: float


class Invoice(msgspec.Struct):
    """What billing produces from an order."""

    order: int
    total: float


invoices: set[int] = set()
complete = threading.Event()


@consumer("orders", group="billing", to="invoices", start_from="first")
def bill(order: Order) -> Invoice:
    return Invoice(order.number, round(order.amount * 1.19, 2))


@consumer("invoices", group="accounting", start_from="first")
async def account(invoice: Invoice) -> None:
    # A message may be delivered twice, so a set records it.
    invoices.add(invoice.order)
    if len(invoices) == ORDERS:
        complete.set()


def main() -> int:
    with cluster() as nameserver:
        with Producer("shop", nameserver=nameserver) as producer:
            for number in range(ORDERS):
                body = msgspec.json.encode(Order(number, 10.0 * number))
                producer.send(Message("orders", body))
        # A program that consumes forever calls turbopump.run(bill, account) instead.
        with Worker(bill, account, nameserver=nameserver):
            is_complete = complete.wait(timeout=60)
    print(f"{len(invoices)} of {ORDERS} orders were billed")
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
