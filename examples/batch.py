"""Batches: many small messages in one request, split to the size that a broker accepts."""

from __future__ import annotations

import sys
import time

from embedded import cluster
from turbopump import Message, Producer, split_batch

COUNT = 20_000


def main() -> int:
    with cluster() as nameserver, Producer("sensors", nameserver=nameserver) as producer:
        messages = (Message("readings", b"%d" % number) for number in range(COUNT))
        started = time.perf_counter()
        ids = [
            unique
            for batch in split_batch(messages)
            for unique in producer.send_batch(batch).message_id.split(",")
        ]
        rate = COUNT / (time.perf_counter() - started)
    print(f"{len(ids)} messages stored, {rate:,.0f} per second")
    return 0 if len(set(ids)) == COUNT else 1


if __name__ == "__main__":
    sys.exit(main())
