"""Delayed delivery: consumers see the message one second after it was sent."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from embedded import cluster
from turbopump import LitePullConsumer, Message, Producer


def main() -> int:
    with cluster() as nameserver, Producer("reminders", nameserver=nameserver) as producer:
        producer.send(Message("delayed", b"now"))
        producer.send(Message("delayed", b"later", delay=timedelta(seconds=1)))
        sent = time.monotonic()
        with LitePullConsumer("clock", nameserver=nameserver, start_from="first") as consumer:
            consumer.assign(consumer.queues("delayed"))
            bodies = []
            for message in consumer:
                bodies.append(message.body)
                print(f"{message.body.decode()} after {time.monotonic() - sent:.2f} s")
                if len(bodies) == 2:
                    break
    return 0 if bodies == [b"now", b"later"] and time.monotonic() - sent >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
