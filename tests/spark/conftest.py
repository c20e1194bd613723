"""Shared by tests on real Spark: one session for the whole process, and one broker."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from servers import Standalone, standalone
from turbopump.spark.session_builder import session

HERE = f"{Path(__file__).parent}/"

# Short programs end before Java's second compiler and parallel collector pay off.
# Also for the processes that tests start.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

LOADS_CLASSES = """
import sys
import turbopump.spark

spark = turbopump.spark.session("classes", master="local[2]")
rows = spark.range(9).selectExpr("id % 2 parity", "cast(id as string) text")
rows.groupBy("parity").count().write.parquet(sys.argv[1] + "/rows")
query = (
    spark.readStream.schema("parity long, count long").parquet(sys.argv[1] + "/rows")
    .writeStream.format("noop").option("checkpointLocation", sys.argv[1] + "/checkpoint")
    .trigger(availableNow=True).start()
)
query.awaitTermination()
spark.stop()
"""


@pytest.fixture(scope="session", autouse=True)
def archived_classes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let Java map Spark's classes from an archive: a session starts in half of the time.

    All processes of a test run share the archive. Java ignores one that it cannot use.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    archive, options = folder / "spark-classes.jsa", os.environ["SPARK_SUBMIT_OPTS"]
    with (folder / "spark-classes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            writes = f"{options} -Xlog:disable -XX:ArchiveClassesAtExit={archive}"
            command = [sys.executable, "-c", LOADS_CLASSES, str(tmp_path_factory.mktemp("classes"))]
            environment = {**os.environ, "SPARK_SUBMIT_OPTS": writes}
            subprocess.run(command, check=True, timeout=400, env=environment)
    uses = f"{options} -Xlog:cds=off -Xlog:cds+dynamic=off -XX:SharedArchiveFile={archive}"
    os.environ["SPARK_SUBMIT_OPTS"] = uses


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is slow: Spark alone takes seconds to start."""
    for item in items:
        # As text: with paths, this would take most of a second for all items.
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def spark(
    tmp_path_factory: pytest.TempPathFactory, archived_classes: None
) -> Iterator[SparkSession]:
    """The one session; two cores, and a task is attempted twice."""
    scratch = tmp_path_factory.mktemp("spark")
    # Java keeps its working directory: files that tests write to relative paths are created there.
    with chdir(scratch):
        found = session(
            "tests",
            master="local[2,2]",
            settings={
                "spark.sql.warehouse.dir": str(scratch / "warehouse"),
                "spark.local.dir": str(scratch / "local"),
            },
        )
    yield found
    found.stop()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A broker for all tests that leave it running; each uses its own topics."""
    with standalone(tmp_path_factory.mktemp("broker")) as found:
        yield found


@pytest.fixture
def filters_allowed(spark: SparkSession) -> Iterator[None]:
    """Let Spark pass the conditions of batch queries to sources that accept them."""
    setting = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(setting, "false")
    spark.conf.set(setting, "true")
    yield
    spark.conf.set(setting, str(before))
