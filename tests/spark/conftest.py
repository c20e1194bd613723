"""Shared by tests on real Spark: one session for the whole process, and one broker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from servers import Standalone, standalone
from turbopump.spark.session_builder import session

HERE = f"{Path(__file__).parent}/"

JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Short programs end before Java's second compiler and parallel collector pay off."""
# Also for the processes that tests start.
os.environ.setdefault("SPARK_SUBMIT_OPTS", JAVA_OPTIONS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is slow: Spark alone takes seconds to start."""
    for item in items:
        # As text: with paths, this would take most of a second for all items.
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
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
