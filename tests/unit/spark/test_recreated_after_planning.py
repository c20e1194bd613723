"""A topic that is deleted and re-created after a batch was planned, before its tasks read it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from turbopump import Message, Producer
from turbopump.admin import Admin
from turbopump.errors import DataLost
from turbopump.spark.reading import partition_reader
from turbopump.spark.records.arrow_arrays import cells
from turbopump.spark.source import BatchReader, DefaultSource, StreamReader
from turbopump.testing.server import RunningServer

pytestmark = pytest.mark.slow
LOST = r"T@broker-a:0: message \d+ is not the one that was there when the batch was planned"


def fill(server: RunningServer, numbers: Iterable[int], tags: str = "t") -> None:
    with Producer("pg", nameserver=server.nameserver) as producer:
        messages = [Message("T", b"%d" % number, tags=tags) for number in numbers]
        producer.send_batch(messages, to=lambda queues: queues[0])


def recreate(server: RunningServer) -> None:
    with Admin(server.nameserver) as admin:
        admin.topics.delete("T")
        admin.topics.create("T", queues=1)


def source(server: RunningServer, **options: str) -> DefaultSource:
    return DefaultSource({"nameserver": server.nameserver, "topic": "T", **options})


def batch_reader(server: RunningServer, **options: str) -> BatchReader:
    made = source(server, **options)
    reader = made.reader(made.schema())
    assert isinstance(reader, BatchReader)
    return reader


def bodies(batches: Iterable[object]) -> list[bytes]:
    return [body for batch in batches for body in cells(batch.column("body"))]  # type: ignore[attr-defined]


@pytest.fixture
def server(turbopump_server: RunningServer) -> RunningServer:
    with Admin(turbopump_server.nameserver) as admin:
        admin.topics.create("T", queues=1)
    fill(turbopump_server, range(20))
    return turbopump_server


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("count", [20, 50])
@pytest.mark.parametrize(
    "options", [{}, {"minpartitions": "4"}, {"tags": "t"}, {"sql": "a IS NULL"}]
)
def test_no_task_mistakes_new_messages_for_the_planned_ones(
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, str],
    count: int,
    *,
    is_direct: bool,
) -> None:
    if not is_direct:
        monkeypatch.setattr(partition_reader, "start_blocking_pull", lambda *_: None)
    reader = batch_reader(server, **options)
    loose = batch_reader(server, failondataloss="false", **options)
    planned = reader.partitions()
    assert len(planned) == int(options.get("minpartitions", "1"))
    assert [n for each in planned for n in bodies(reader.read(each))] == [
        b"%d" % n for n in range(20)
    ]
    fill(server, range(20, 30))
    assert len([n for each in planned for n in bodies(reader.read(each))]) == 20, (
        "later ones are fine"
    )
    recreate(server)
    fill(server, range(100, 100 + count))
    for each in planned:
        with pytest.raises(DataLost, match=LOST + ".*failOnDataLoss=false continues"):
            bodies(reader.read(each))
        assert bodies(loose.read(each)) == []
    assert (
        "the topic was re-created, or its broker lost messages; continuing without" in caplog.text
    )


@pytest.mark.parametrize("given", [{"tags": "t"}, {"sql": "TAGS = 't'"}])
def test_a_filter_that_matches_nothing_new_hides_no_loss(
    server: RunningServer, given: dict[str, str]
) -> None:
    reader = batch_reader(server, **given)
    (planned,) = reader.partitions()
    recreate(server)
    fill(server, range(20), tags="other")
    with pytest.raises(DataLost, match=LOST):
        bodies(reader.read(planned))


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_stream_notices_it_too(server: RunningServer, *, is_repeated: bool) -> None:
    def stream() -> StreamReader:
        made = source(server, startingoffsets="earliest")
        reader = made.streamReader(made.schema())
        assert isinstance(reader, StreamReader)
        return reader

    reader = stream()
    limit = reader.getDefaultReadLimit()
    start = reader.latestOffset({}, limit)
    end = reader.latestOffset(start, limit)
    (planned,) = (stream() if is_repeated else reader).partitions(start, end)
    assert len(bodies(reader.read(planned))) == 20
    recreate(server)
    fill(server, range(100, 125))
    with pytest.raises(DataLost, match=LOST):
        bodies(reader.read(planned))
    reader.stop()
