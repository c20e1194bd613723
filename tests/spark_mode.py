"""Write, read, stream and consume in one Spark mode: a program that `test_modes` starts.

::

    python spark_mode.py '{"master": "local[2]", "settings": {}}' nameserver folder
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession

import turbopump.spark
from turbopump.errors import InvalidArgument
from turbopump.spark import pipelines

ROWS = 300


def main() -> None:
    mode, nameserver, folder = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
    name = json.dumps(mode)
    topic = "mode-" + "".join(letter for letter in name if letter.isalnum())[:60]
    spark = turbopump.spark.session("modes", **mode)
    cluster = {"nameserver": nameserver}
    rows = spark.sql(f"select cast(id as string) body, id % 4 queueId from range({ROWS})")
    (rows.write.format("rocketmq").options(**cluster, topic=topic).mode("append").save())
    read = spark.read.format("rocketmq").options(**cluster, topic=topic)
    found = read.load().selectExpr("count(*) n", "count(distinct body) bodies").collect()[0]
    source = {**cluster, "topic": topic, "startingOffsets": "earliest", "onBadRecord": "skip"}
    query = (
        turbopump.spark.counted_stream(spark, source)
        .select("body")
        .writeStream.format("rocketmq")
        .options(**cluster, topic=topic + "-copy", checkpointLocation=folder)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    (behind,) = turbopump.spark.lag(query)
    assert (behind.rows, behind.bad, behind.offsets_total) == (ROWS, 0, 0), behind
    copied = spark.read.format("rocketmq").options(**cluster, topic=topic + "-copy").load()
    once = turbopump.spark.without_duplicates(copied)
    consumer = turbopump.spark.SparkConsumer(
        topic,
        lambda message: message.topic == topic,
        spark=spark,
        nameserver=nameserver,
        subscriptions={topic: "*"},
        checkpoint=folder + "-consumer",
        start_from="first",
    )
    handled = consumer.run(available_now=True).handled
    if "remote" in mode:
        _see_pipelines_refused(spark)
    counts = [found.n, found.bodies, copied.count(), once.count(), handled]
    spark.stop()
    sys.stdout.write(json.dumps(counts) + "\n")


def _see_pipelines_refused(spark: SparkSession) -> None:
    try:
        pipelines.lag(spark, "127.0.0.1:1")
    except InvalidArgument as error:
        assert "Spark Connect" in str(error)
    else:
        raise AssertionError("a pipeline ran on Spark Connect")


if __name__ == "__main__":
    main()
