"""A Spark session with the settings that suit small batches of messages on one machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from turbopump.spark.java import ensure_java

SETTINGS: Mapping[str, str] = {
    # Batches of messages are small: 200 shuffle partitions would cost more than the work.
    "spark.sql.shuffle.partitions": "4",
    # Halves the time of a micro-batch that is read by Python.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # For checkpoints on a local disk: plain renames, and no second file with a checksum for each.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def session(
    app_name: str = "turbopump",
    *,
    master: str = "local[*]",
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a Spark session that knows ``rocketmq``, making it with settings fit for messages.

    A session that exists already is returned as it is. Java is found or provided first.

    ::

        spark = turbopump.spark.session("orders", settings={"spark.driver.memory": "2g"})
    """
    from turbopump.spark.source import register

    ensure_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name).master(master)
    for name, value in {**_SETTINGS_WITH_LOGS, **(settings or {})}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


_LOGGING = Path(__file__).with_name("log4j2.properties")

_SETTINGS_WITH_LOGS = {
    **SETTINGS,
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
}
