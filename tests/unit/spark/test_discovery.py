"""How Spark finds the source by itself: a lightweight import that cannot fail."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

import pyspark_rocketmq
import pyspark_rocketmq_store
from turbopump.errors import InvalidArgument
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.records.schema import spark_schema
from turbopump.spark.source import BatchReader, DefaultSource, StreamReader

PROGRAM = """
import sys
import pyspark.sql.datasource
before = set(sys.modules)
import pyspark_rocketmq
import pyspark_rocketmq_store
print(*sorted(set(sys.modules) - before))
"""

WITHOUT_PACKAGES = """
import sys
sys.modules["numpy"] = sys.modules["pyarrow"] = None
import pyspark_rocketmq
import pyspark_rocketmq_store
for module in pyspark_rocketmq, pyspark_rocketmq_store:
    try:
        module.DefaultSource({"path": "/nowhere", "topic": "orders"}).schema()
    except ImportError as error:
        print(error)
"""


def test_the_module_exports_the_source() -> None:
    assert pyspark_rocketmq.DefaultSource is DefaultSource
    assert DefaultSource.name() == "rocketmq"


@pytest.mark.parametrize(
    ("module", "home", "name"),
    [
        (pyspark_rocketmq, "turbopump.spark.source", "rocketmq"),
        (pyspark_rocketmq_store, "turbopump.spark.offline.source", "rocketmq-store"),
    ],
)
def test_installation_problems_are_reported_on_use(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, home: str, name: str
) -> None:
    with monkeypatch.context() as broken:
        broken.setitem(sys.modules, home, None)
        found = importlib.reload(module).DefaultSource
        assert found.name() == name
        source = found({})
        for call in (source.schema, lambda: source.reader(schema=None), source.streamWriter):
            with pytest.raises(ImportError, match=rf'"{name}"\) cannot be used here: .*{home}'):
                call()
    assert importlib.reload(module).DefaultSource is importlib.import_module(home).DefaultSource


def test_a_schema_chooses_among_the_columns_of_the_options() -> None:
    options = {"nameserver": "127.0.0.1:1", "topic": "orders", "includeProperties": "false"}
    source = DefaultSource(options)
    reader = source.reader(spark_schema(("body", "topic")))
    assert isinstance(reader, BatchReader)
    assert reader._options.columns == ("body", "topic")
    for make in (source.reader, source.streamReader):
        with pytest.raises(InvalidArgument, match="schema has properties, which the options"):
            make(spark_schema(("body", "properties")))


@pytest.mark.parametrize(
    ("options", "rows_max"),
    [
        ({}, 2**63 - 1),
        ({"maxBytesPerTrigger": "1k", "minOffsetsPerTrigger": "5"}, 2**63 - 1),
        ({"maxOffsetsPerTrigger": "70", "maxBytesPerTrigger": "1k"}, 70),
    ],
)
def test_spark_always_gets_a_limit(options: dict[str, str], rows_max: int) -> None:
    # Never `ReadAllAvailable`, which is for `trigger(once=True)`.
    plain = {"nameserver": "127.0.0.1:1", "topic": "orders"}
    reader = StreamReader(SourceOptions.for_stream(plain | options))
    assert reader.getDefaultReadLimit() == ReadMaxRows(rows_max)


@pytest.mark.slow
def test_finding_the_sources_loads_nothing_that_they_need_later() -> None:
    loaded = printed_by(PROGRAM).split()
    assert {"turbopump.spark.source", "turbopump.spark.offline.source"} <= set(loaded)
    heavy = {"pyarrow", "numpy", "asyncio", "turbopump.client"}
    assert heavy.isdisjoint(loaded)


@pytest.mark.slow
def test_sources_without_their_packages_are_found_and_say_what_is_missing() -> None:
    wrong = printed_by(WITHOUT_PACKAGES).splitlines()
    for name, line in zip(("rocketmq", "rocketmq-store"), wrong, strict=True):
        assert line.startswith(f'format("{name}") cannot be used here: ')
        assert "pyarrow" in line or "numpy" in line
        assert "extra spark" in line


def printed_by(program: str) -> str:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
