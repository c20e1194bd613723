"""Push consumer: calls a function as soon as the broker has messages."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

from embedded import cluster
from turbopump import ConsumeContext, ConsumeResult, Message, MessageView, Producer, PushConsumer

ORDERS = 100


def main() -> int:
    seen: set[str] = set()
    done = threading.Event()

    def handle(messages: Sequence[MessageView], _: ConsumeContext) -> ConsumeResult:
        # Called concurrently in threads; redelivered messages make no difference to a set.
        seen.update(message.keys[0] for message in messages)
        if len(seen) == ORDERS // 2:
            done.set()
        return ConsumeResult.SUCCESS

    with (
        cluster() as nameserver,
        Producer("orders-producer", nameserver=nameserver) as producer,
    ):
        for number in range(ORDERS):
            tag = "paid" if number % 2 else "created"
            producer.send(Message("orders", b"{}", tags=tag, keys=[str(number)]))
        with PushConsumer(
            "billing",
            handle,
            nameserver=nameserver,
            subscriptions={"orders": "paid"},
            start_from="first",
        ):
            # A service calls consumer.wait() instead.
            is_complete = done.wait(timeout=30)
    print(f"{len(seen)} of {ORDERS} orders were paid")
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
