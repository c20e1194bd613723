"""A streaming query that is killed: ``source_to_kill.py nameserver topic folder [hang]``.

It writes the numbers of each batch to a file named after the batch. With ``hang`` it reports so and
blocks in the first batch with messages, whose end Spark has recorded but whose success it has not.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from pyspark.sql import DataFrame

import turbopump.spark


def main() -> None:
    nameserver, topic, folder = sys.argv[1:4]
    is_hanging = sys.argv[4:] == ["hang"]
    out = Path(folder) / "out"
    out.mkdir(parents=True, exist_ok=True)

    def keep(rows: DataFrame, batch: int) -> None:
        numbers = sorted(int(bytes(row.body)) for row in rows.select("body").collect())
        (out / f"{batch}.json").write_text(json.dumps(numbers))
        sys.stdout.write(f"batch {batch} {len(numbers)}\n")
        sys.stdout.flush()
        while is_hanging and numbers:
            time.sleep(60)

    spark = turbopump.spark.session("to-kill", master="local[2]")
    rows = spark.readStream.format("rocketmq").options(nameserver=nameserver, topic=topic).load()
    writer = rows.writeStream.foreachBatch(keep)
    writer = writer.option("checkpointLocation", str(Path(folder) / "checkpoint"))
    query = writer.start() if is_hanging else writer.trigger(availableNow=True).start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
