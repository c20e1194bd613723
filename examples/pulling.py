"""Explicit pulls: the application chooses queues and offsets, and commits."""

from __future__ import annotations

import sys

from embedded import cluster
from turbopump import Found, Message, Producer, PullConsumer

COUNT = 100


def main() -> int:
    with cluster() as nameserver:
        with Producer("orders-producer", nameserver=nameserver) as producer:
            for number in range(COUNT):
                producer.send(Message("pulled", b"%d" % number, tags=("a", "b")[number % 2]))
        read = sum(read_all(nameserver) for _ in range(2))
    print(f"{read} messages with tag a; the second round found none, as all were committed")
    return 0 if read == COUNT // 2 else 1


def read_all(nameserver: str) -> int:
    """Read every queue from the group's committed offset to its end."""
    count = 0
    with PullConsumer("audit", nameserver=nameserver) as consumer:
        for queue in consumer.queues("pulled"):
            offset = consumer.committed(queue) or 0
            while offset < consumer.max_offset(queue):
                outcome = consumer.pull(queue, offset, tags="a")
                if isinstance(outcome, Found):
                    count += len(outcome.messages)
                offset = outcome.next_offset
            consumer.commit(queue, offset)
    return count


if __name__ == "__main__":
    sys.exit(main())
