"""Order: the messages of one customer go to one queue, which preserves their order."""

from __future__ import annotations

import sys
from collections import defaultdict

from embedded import cluster
from turbopump import LitePullConsumer, Message, Producer, by_hash

STEPS = [b"created", b"paid", b"shipped"]
CUSTOMERS = [f"customer-{number}" for number in range(20)]


def main() -> int:
    seen: dict[str, list[bytes]] = defaultdict(list)
    with cluster() as nameserver:
        with Producer("orders-producer", nameserver=nameserver) as producer:
            for step in STEPS:
                for customer in CUSTOMERS:
                    producer.send(Message("ordered", step, keys=[customer]), to=by_hash(customer))
        with LitePullConsumer("audit", nameserver=nameserver, start_from="first") as consumer:
            consumer.assign(consumer.queues("ordered"))
            while sum(map(len, seen.values())) < len(STEPS) * len(CUSTOMERS):
                for message in consumer.poll():
                    seen[message.keys[0]].append(message.body)
    in_order = sum(steps == STEPS for steps in seen.values())
    print(f"{in_order} of {len(CUSTOMERS)} customers saw their order created, paid, then shipped")
    return 0 if in_order == len(CUSTOMERS) else 1


if __name__ == "__main__":
    sys.exit(main())
