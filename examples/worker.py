"""A module for the command `turbopump worker`, here run in two processes.

::

    python examples/worker.py                                   # a complete run
    cd examples && turbopump worker worker --processes 2        # on a running cluster
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from embedded import cluster
from turbopump import LitePullConsumer, Producer, consumer

ORDERS = 10


class Order(msgspec.Struct):
    """What customers send."""

    number: int
    amount: float


class Invoice(msgspec.Struct):
    """What billing produces from an order."""

    order: int
    total: float


@consumer("orders", group="billing", to="invoices", start_from="first")
def bill(order: Order) -> Invoice:
    return Invoice(order.number, round(order.amount * 1.19, 2))


def main() -> int:
    with cluster() as nameserver:
        with Producer("shop", nameserver=nameserver) as producer:
            for number in range(ORDERS):
                producer.send_json("orders", Order(number, 10.0 * number))
        options = ["--processes", "2", "--nameserver", nameserver]
        with subprocess.Popen(
            [sys.executable, "-m", "turbopump", "worker", "worker", *options],
            cwd=Path(__file__).parent,
        ) as worker:
            billed = invoiced_orders(nameserver)
            # Running calls finish before it ends.
            worker.terminate()
        print(f"{len(billed)} of {ORDERS} orders were billed; exit code {worker.returncode}")
    return worker.returncode


def invoiced_orders(nameserver: str) -> set[int]:
    """Read invoices until all orders have one."""
    # An invoice may be published twice, so a set records it.
    found: set[int] = set()
    with LitePullConsumer(
        "accounting",
        nameserver=nameserver,
        subscriptions={"invoices": "*"},
        start_from="first",
    ) as invoices:
        for message in invoices:
            found.add(message.json(Invoice).order)
            if len(found) == ORDERS:
                break
    return found


if __name__ == "__main__":
    sys.exit(main())
