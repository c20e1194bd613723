"""Polling: two members share a topic's queues; each message goes to one of them."""

from __future__ import annotations

import sys
import threading

from embedded import cluster
from turbopump import LitePullConsumer, Message, Producer

COUNT = 400


def main() -> int:
    seen: dict[str, list[str]] = {"one": [], "other": []}
    with cluster() as nameserver:
        with Producer("orders-producer", nameserver=nameserver) as producer:
            for number in range(COUNT):
                producer.send(Message("shared", b"%d" % number))
        members = [threading.Thread(target=consume, args=(nameserver, name, seen)) for name in seen]
        for member in members:
            member.start()
        for member in members:
            member.join()
    distinct = set().union(*seen.values())
    print(", ".join(f"{name} saw {len(ids)}" for name, ids in seen.items()))
    return 0 if len(distinct) == COUNT else 1


def consume(nameserver: str, name: str, seen: dict[str, list[str]]) -> None:
    """Poll until the members have everything; a queue that moves may repeat messages."""
    with LitePullConsumer(
        "billing", nameserver=nameserver, subscriptions={"shared": "*"}, start_from="first"
    ) as consumer:
        while len(set().union(*seen.values())) < COUNT:
            seen[name] += [message.message_id for message in consumer.poll(timeout=0.1)]


if __name__ == "__main__":
    sys.exit(main())
