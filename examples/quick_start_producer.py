"""Sending messages: one by one, many at a time, and one-way."""

from __future__ import annotations

import sys

from embedded import cluster
from turbopump import Message, Producer, SendStatus


def main() -> int:
    with cluster() as nameserver, Producer("orders-producer", nameserver=nameserver) as producer:
        receipt = producer.send(Message("orders", b'{"order": 42}', tags="created", keys=["42"]))
        print(f"{receipt.message_id} is number {receipt.queue_offset} of {receipt.queue}")

        promises = [producer.submit(Message("orders", b"%d" % number)) for number in range(1000)]
        receipts = [promise.result() for promise in promises]
        print(f"{len(receipts)} more, in {len({each.queue for each in receipts})} queues")

        producer.send_oneway(Message("metrics", b"nobody minds if this one is lost"))
        return 0 if all(each.status is SendStatus.OK for each in receipts) else 1


if __name__ == "__main__":
    sys.exit(main())
