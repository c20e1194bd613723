"""A function over messages on Spark's executors: retries, dead letters and a report."""

from __future__ import annotations

import json
import sys
import tempfile

from embedded import cluster
from turbopump import LitePullConsumer, Message, MessageView, Producer
from turbopump.spark import GiveUp, RetryLater, SparkConsumer, session

ORDERS = [{"order": n, "amount": 10 * n} for n in range(20)]


def charge(message: MessageView) -> object:
    order = json.loads(message.body)["order"]
    if order == 7:
        return GiveUp()
    if order % 5 == 0 and message.reconsume_times == 0:
        # Raising means the same, with redelivery after ten seconds.
        return RetryLater(delay_level=1)
    return True


def main() -> int:
    spark = session("billing", master="local[2]")
    with cluster() as nameserver, tempfile.TemporaryDirectory() as checkpoint:
        with Producer("shop", nameserver=nameserver) as producer:
            for order in ORDERS:
                producer.send(Message("orders", json.dumps(order).encode(), tags="created"))
        consumer = SparkConsumer(
            "billing",
            charge,
            spark=spark,
            nameserver=nameserver,
            subscriptions={"orders": "created || paid"},
            checkpoint=checkpoint,
            start_from="first",
        )
        with consumer.start() as run:
            run.wait_until(lambda report: report.handled + report.dead == len(ORDERS), 90)
        report = run.report()
        print(report)
        with LitePullConsumer(
            "undertaker",
            nameserver=nameserver,
            subscriptions={"%DLQ%billing": "*"},
            start_from="first",
        ) as dead_letters:
            letter = next(iter(dead_letters))
        print(f"dead letter: {letter.body.decode()}")
    spark.stop()
    # Orders 0, 5, 10 and 15 were redelivered once.
    return 0 if (report.handled, report.retried, report.dead) == (19, 4, 1) else 1


if __name__ == "__main__":
    sys.exit(main())
