"""``format("rocketmq-store")`` on real Spark; the unit tests cover the many cases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import spark_partition_id

from offline_stores import as_inspected, message, position_of, unpacked, written
from turbopump.spark.records.schema import spark_schema


def loaded(spark: SparkSession, path: Path, **options: object) -> DataFrame:
    # Not registered explicitly: Spark finds it by itself.
    reader = spark.read.format("rocketmq-store")
    return reader.options(**{key: str(value) for key, value in options.items()}).load(str(path))


def test_bad_records_fail_are_null_or_are_skipped(spark: SparkSession, tmp_path: Path) -> None:
    store = written(tmp_path, map(message, range(12)), 1024)
    first, *_ = sorted((store / "commitlog").iterdir())
    damaged = bytearray(first.read_bytes())
    at = position_of(loaded(spark, store, columns="offsetMsgId").collect()[1].asDict())
    damaged[at + 88] ^= 0x55
    first.write_bytes(damaged)
    with pytest.raises(PySparkException, match="onBadRecord=skip leaves out damaged messages"):
        loaded(spark, store).collect()
    kept = loaded(spark, store, onBadRecord="null", columns="queueOffset,body,decodeError")
    (bad,) = kept.where("decodeError IS NOT NULL").collect()
    assert (bad.queueOffset, bad.body) == (1, None)
    assert "body does not match its checksum" in bad.decodeError
    rows = loaded(spark, store, onBadRecord="skip").collect()
    assert sorted(row.queueOffset for row in rows) == [0, *range(2, 12)]
    with pytest.raises(PySparkException, match="onBadRecord=deadLetter needs a broker"):
        loaded(spark, store, onBadRecord="deadLetter")


def test_a_brokers_store_is_what_its_inspection_shows(spark: SparkSession, tmp_path: Path) -> None:
    store = unpacked("store", tmp_path)
    asked = [sys.executable, "-m", "turbopump.store", "inspect", str(store), "--messages"]
    printed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    wanted = [json.loads(line) for line in printed.splitlines()]
    for one in wanted:
        one.pop("bodyHex")
    messages = loaded(spark, store, includeInternal=True, bytesPerPartition=30_000)
    assert messages.schema == spark_schema()
    rows = [row.asDict() for row in messages.withColumn("task", spark_partition_id()).collect()]
    assert len({row["task"] for row in rows}) > 4
    found = [as_inspected(row, position_of(row)) for row in rows]
    assert sorted(found, key=lambda one: int(one["physicalOffset"])) == wanted


def test_a_store_of_several_files_with_a_torn_end(spark: SparkSession, tmp_path: Path) -> None:
    store = written(tmp_path, map(message, range(500)), 16_384)
    last = max((store / "commitlog").iterdir())
    content = last.read_bytes()
    end = len(content.rstrip(b"\0")) - 30
    last.write_bytes(content[:end] + bytes(len(content) - end))
    messages = loaded(spark, store, bytesPerPartition=10_000, columns="queueOffset,tags")
    rows = messages.collect()
    assert sorted(row["queueOffset"] for row in rows) == list(range(499))
    assert sum(row["tags"] == "even" for row in rows) == 250


@pytest.mark.parametrize(
    ("options", "wrong"),
    [({"tagz": "a"}, "did you mean tags"), ({"columns": "nothing"}, "unknown column 'nothing'")],
)
def test_invalid_options_are_rejected(
    spark: SparkSession, tmp_path: Path, options: dict[str, Any], wrong: str
) -> None:
    store = written(tmp_path, map(message, range(5)), 4096)
    with pytest.raises((AnalysisException, PySparkException), match=wrong):
        loaded(spark, store, **options).collect()


def test_a_directory_that_is_not_a_store_is_rejected(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises((AnalysisException, PySparkException), match="is not a store"):
        loaded(spark, tmp_path / "nowhere").collect()
