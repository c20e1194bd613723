"""Archive a topic to Parquet, merge its files, and replay half of it ten times as fast.

Run: ``python examples/archive_and_replay.py``
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from embedded import cluster
from turbopump import Message, Producer
from turbopump.spark import pipelines, session

ORDERS = 40


def main() -> int:
    spark = session("archive and replay", master="local[2]")
    with cluster() as nameserver, tempfile.TemporaryDirectory() as directory:
        archive = Path(directory) / "orders"
        with Producer("shop", nameserver=nameserver) as producer:
            for number in range(ORDERS):
                body = json.dumps({"order": number}).encode()
                tag = "created" if number % 2 else "paid"
                producer.send(Message("orders", body, tags=tag, keys=[str(number)]))
                time.sleep(0.02)

        source = {"nameserver": nameserver, "topic": "orders", "maxOffsetsPerTrigger": "16"}
        archived = pipelines.archive(spark, archive, source)
        print(f"archived {archived.rows} messages in {archived.files} files")
        merged = pipelines.compact(spark, archive)
        print(f"merged {merged.files_before} files into {merged.files_after}")
        pipelines.read_archive(spark, archive).groupBy("topic", "date", "tags").count().show()

        replayed = pipelines.replay(
            spark,
            archive,
            {"nameserver": nameserver},
            {"orders": "orders-again"},
            where="tags = 'paid'",
            pace=pipelines.Pace(speed=10.0),
        )
        print(f"sent {replayed.sent} of {replayed.chosen} messages to orders-again")
        # A second run has nothing to do: the checkpoint records what was archived.
        again = pipelines.archive(spark, archive, source)
    spark.stop()
    counts = (archived.rows, replayed.sent, again.rows)
    return 0 if counts == (ORDERS, ORDERS // 2, 0) else 1


if __name__ == "__main__":
    sys.exit(main())
