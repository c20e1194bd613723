"""The Spark programs of the documents, run one after the other in the shared session."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from documents import NAMESERVER, blocks, is_for_spark, is_whole
from servers import Standalone
from turbopump import Message, Producer

PROGRAMS = [
    (place, program)
    for place, program in blocks("python")
    if is_for_spark(program) and is_whole(program)
]


@pytest.fixture(scope="module", autouse=True)
def orders(broker: Standalone) -> None:
    """What the quick start has sent before people come to Spark."""
    with Producer("orders-producer", nameserver=broker.nameserver) as producer:
        for number in range(10):
            producer.send(Message("orders", b'{"order": %d}' % number, tags="created"))


@pytest.mark.parametrize(("place", "program"), PROGRAMS, ids=[place for place, _ in PROGRAMS])
def test_program_runs(
    place: str,
    program: str,
    spark: SparkSession,
    broker: Standalone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # A program may end its session; here it belongs to all of them.
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    text = program.replace(NAMESERVER, broker.nameserver)
    exec(compile(text, place, "exec"), {"__name__": "__main__"})
    assert not [query.name for query in spark.streams.active], "the program left a query running"
