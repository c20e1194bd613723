"""Archives on real Spark: each message once, whatever dies when, and merged without loss."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from servers import Standalone
from shells import wait_for
from turbopump import Message, Producer
from turbopump.cli.app import app
from turbopump.errors import InvalidArgument, SparkError
from turbopump.spark import LagListener
from turbopump.spark.pipelines import (
    archive,
    archive_delta,
    archive_writer,
    compact,
    compaction,
    read_archive,
)
from turbopump.spark.pipelines.archive_reader import batch_folders, pending_merges
from turbopump.spark.pipelines.progress import Step

ROOT = Path(__file__).parents[2]


@pytest.fixture
def topic() -> str:
    return f"archived-{uuid.uuid4().hex}"


@pytest.fixture
def producer(broker: Standalone) -> Iterator[Producer]:
    with Producer("archive-tests", nameserver=broker.nameserver) as running:
        yield running


def send(producer: Producer, topic: str, numbers: range) -> None:
    for number in numbers:
        tag = "even" if number % 2 == 0 else "odd"
        producer.send(Message(topic, str(number).encode(), tags=tag, keys=[str(number)]))


def numbers(frame: DataFrame) -> Counter[int]:
    return Counter(int(row["body"]) for row in frame.select("body").collect())


def test_each_message_is_archived_once_and_merging_loses_none(
    spark: SparkSession,
    broker: Standalone,
    producer: Producer,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The life of one archive: two runs, a crash between writing and recording it, and merges."""
    path = tmp_path / "archive"
    source = {"nameserver": broker.nameserver, "topic": topic, "maxOffsetsPerTrigger": "20"}
    send(producer, topic, range(50))
    first = archive(spark, path, source)
    assert (first.rows, first.batches) == (50, 3)
    assert first.body_bytes == sum(len(str(number)) for number in range(50))
    folders = batch_folders(path)
    assert (first.files, first.file_bytes) == (
        sum(each.files for each in folders),
        sum(each.file_bytes for each in folders),
    )
    assert {each.partition.partition("/")[0] for each in folders} == {f"topic={topic}"}

    send(producer, topic, range(50, 60))
    with monkeypatch.context() as patch:
        write = archive_writer._Writer.write

        def dying(writer: archive_writer._Writer, frame: DataFrame, batch_id: int) -> None:
            write(writer, frame, batch_id)
            raise RuntimeError("died before it was noted")

        patch.setattr(archive_writer._Writer, "write", dying)
        with pytest.raises(SparkError, match="died before it was noted"):
            archive(spark, path, source)
    # The rows exist; the query does not know, and writes them again, over themselves.
    assert numbers(read_archive(spark, path)) == Counter(range(60))
    stop = threading.Event()

    def stop_when_done(step: Step) -> None:
        if step.done == 10:
            stop.set()

    # This time it would run forever.
    second = archive(spark, path, source, interval=0.5, watch=stop_when_done, stop=stop)
    assert second.rows == 10
    assert numbers(read_archive(spark, path)) == Counter(range(60))

    before = read_archive(spark, path).drop("batch")
    expected = Counter(map(str, before.collect()))
    merged = compact(spark, path)
    assert (merged.merges, merged.rows) == (1, 50)
    assert merged.files_after < merged.files_before
    plain = spark.read.parquet(str(path)).select(*before.columns)
    assert Counter(map(str, read_archive(spark, path).drop("batch").collect())) == expected
    assert plain.count() == 60
    assert compact(spark, path).merges == 0


def test_interrupted_merge_is_seen_once_and_finished_by_the_next_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "archive"
    for batch in range(4):
        frame = spark.range(batch * 10, batch * 10 + 10).selectExpr("CAST(id AS STRING) AS body")
        frame.coalesce(1).write.parquet(f"{path}/topic=42/batch=00000000-{batch:010}")
    assert dict(read_archive(spark, path).dtypes)["topic"] == "string"

    def die(*_: object) -> None:
        raise RuntimeError("died")

    with monkeypatch.context() as patch:
        patch.setattr(compaction, "complete_merge", die)
        with pytest.raises(RuntimeError, match="died"):
            compact(spark, path)
    assert len(pending_merges(path)) == 1
    assert numbers(read_archive(spark, path)) == Counter(range(40)), "decided, nothing moved yet"

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", die)
        with pytest.raises(RuntimeError, match="died"):
            compact(spark, path)
    assert numbers(read_archive(spark, path)) == Counter(range(40)), "moved, sources still exist"
    assert max(numbers(spark.read.parquet(str(path))).values()) == 2, "other readers see them twice"

    done = compact(spark, path)
    assert (done.finished_for_others, done.merges) == (1, 0)
    assert numbers(spark.read.parquet(str(path))) == Counter(range(40))
    assert len(batch_folders(path)) == 2


def test_a_merge_that_runs_concurrently_or_loses_rows_changes_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "archive"
    for batch in range(3):
        spark.range(5).coalesce(1).write.parquet(f"{path}/topic=a/batch=00000000-{batch:010}")
    with (
        compaction._exclusively(path),
        pytest.raises(SparkError, match=r"another compaction of .* is running"),
    ):
        compact(spark, path)
    real = compaction.content_of

    def losing(directories: Sequence[Path]) -> compaction.Content:
        found = real(directories)
        is_merged = "_compaction" in str(directories[0])
        return compaction.Content(found.rows - 1, frozenset()) if is_merged else found

    monkeypatch.setattr(compaction, "content_of", losing)
    lost = "gave 9 rows of 10, without id INT64 .*: nothing was changed"
    with pytest.raises(SparkError, match=lost):
        compact(spark, path)
    assert len(batch_folders(path)) == 3
    assert pending_merges(path) == []


def test_folders_with_other_columns_are_not_merged_and_read_with_all(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / "archive"
    wide = spark.range(5).selectExpr("id queueOffset", "CAST(id AS STRING) body")
    for batch, frame in enumerate([wide.drop("body"), wide, wide, wide.drop("body"), wide]):
        frame.coalesce(1).write.parquet(f"{path}/topic=a/batch=00000000-{batch:010}")
    assert compact(spark, path).merges == 1
    assert len(batch_folders(path)) == 4, "only neighbours with the same columns are merged"
    found = read_archive(spark, path).selectExpr("count(*) rows", "count(body) bodies").collect()
    assert tuple(found[0]) == (25, 15)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/St_Johns"])
def test_dates_and_hours_are_those_of_utc(spark: SparkSession, zone: str) -> None:
    before = str(spark.conf.get("spark.sql.session.timeZone"))
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        # Half an hour before and after an hour that Berlin skips; the end of a day; 1969.
        texts = ["2026-03-29T00:30:00", "2026-03-29T01:30:00", "2026-10-25T23:59:59"]
        texts.append("1969-12-31T23:59:59")
        rows = [(datetime.fromisoformat(f"{text}+00:00"),) for text in texts]
        frame = spark.createDataFrame(rows, "storeTimestamp timestamp")
        derived = frame.select(
            *(each.alias(name) for name, each in archive_writer._derived(("date", "hour")).items())
        )
        found = [f"{row.date}T{row.hour:02}" for row in derived.collect()]
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert found == [text[:13] for text in texts]


def test_an_archive_on_another_file_system_keeps_its_settings_and_is_read(
    spark: SparkSession, broker: Standalone, producer: Producer, topic: str, tmp_path: Path
) -> None:
    """Through Hadoop, as on any remote file system."""
    context: Any = spark.sparkContext
    hadoop = context._jsc.hadoopConfiguration()
    hadoop.set(f"fs.viewfs.mounttable.{topic}.link./lake", f"file://{tmp_path}")
    path = f"viewfs://{topic}/lake/archive"
    send(producer, topic, range(6))
    source = {"nameserver": broker.nameserver, "topic": topic, "columns": "topic,body,tags"}
    report = archive(spark, path, source, partition_by=["tags"])
    assert (report.rows, report.files) == (6, None)
    assert numbers(read_archive(spark, path)) == Counter(range(6))
    with pytest.raises(InvalidArgument, match="is partitioned by tags, got partition_by"):
        archive(spark, path, source, partition_by=["topic"])
    with pytest.raises(InvalidArgument, match="has the columns topic,body,tags, got"):
        archive(spark, path, {**source, "columns": "topic,tags"}, partition_by=["tags"])
    with pytest.raises(SparkError, match=r"archive .*nowhere"):
        read_archive(spark, "nowhere://lake/archive")


def killed(*arguments: object) -> None:
    """Run a program that archives until it kills itself."""
    program = ROOT / "tests" / "spark" / "archive_to_kill.py"
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=480,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def test_delta_table_has_each_message_once_whenever_it_dies(
    spark: SparkSession,
    broker: Standalone,
    producer: Producer,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # By name: mypy checks this where the package is not installed, too.
    DeltaTable = import_module("deltalake").DeltaTable  # noqa: N806 - a class

    def rows() -> Counter[int]:
        table = DeltaTable(path).to_pyarrow_table(columns=["body"])
        return Counter(map(int, table.column("body").to_pylist()))

    path = tmp_path / "table"
    source = {"nameserver": broker.nameserver, "topic": topic}
    send(producer, topic, range(40))
    commit = archive_delta.DeltaArchive._commit

    def dying(
        table: archive_delta.DeltaArchive, actions: Sequence[Any], query_id: str, batch_id: int
    ) -> None:
        if table.size.files:
            raise RuntimeError("died before the commit")
        commit(table, actions, query_id, batch_id)

    with monkeypatch.context() as patch:
        patch.setattr(archive_delta.DeltaArchive, "_commit", dying)
        with pytest.raises(SparkError, match="died before the commit"):
            archive(spark, path, {**source, "maxOffsetsPerTrigger": "15"}, format="delta")
    assert (sum(rows().values()), max(rows().values())) == (15, 1)
    # Repeats the second batch, and is killed after it has committed the third one.
    killed(path, broker.nameserver, topic, "delta")
    assert rows() == Counter(range(40))
    report = archive(spark, path, source, format="delta")
    assert (report.rows, report.files) == (0, 0), "the table has the batch that was not recorded"
    send(producer, topic, range(40, 43))
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    names: set[str] = set()
    listener = LagListener(lambda lag: names.add(lag.query))
    spark.streams.addListener(listener)
    line = ["pipeline", "archive", topic, "--to", str(path), "--format", "delta", "--json"]
    told = CliRunner().invoke(app, [*line, "--nameserver", broker.nameserver])
    assert told.exit_code == 0, told.stderr
    assert (json.loads(told.stdout)["rows"], rows()) == (3, Counter(range(43)))
    wait_for(lambda: names == {f"archive of {topic} in {path}"})
    spark.streams.removeListener(listener)
    found = DeltaTable(path).to_pyarrow_table()
    dates = [each.date() for each in found.column("storeTimestamp").to_pylist()]
    assert found.column("date").to_pylist() == dates
    assert set(found.column("topic").to_pylist()) == {topic}
    with pytest.raises(InvalidArgument, match="has the format delta, got parquet"):
        archive(spark, path, source)
    with pytest.raises(InvalidArgument, match="is a Delta table: use deltalake"):
        read_archive(spark, path)
    with pytest.raises(InvalidArgument, match="is a Delta table: use deltalake"):
        compact(spark, path)
    with pytest.raises(InvalidArgument, match="format must be one of parquet, delta, got 'orc'"):
        archive(spark, path, source, format="orc")
    with pytest.raises(InvalidArgument, match=r"must be a directory of this machine, got 's3a:"):
        archive(spark, "s3a://lake/table", source, format="delta")


def test_killed_between_writing_and_noting(
    spark: SparkSession, broker: Standalone, producer: Producer, topic: str, tmp_path: Path
) -> None:
    """The process dies immediately, with its Java; another one resumes from what it left."""
    path = tmp_path / "archive"
    send(producer, topic, range(40))
    killed(path, broker.nameserver, topic, "parquet")
    written = numbers(spark.read.parquet(str(path)))
    assert (sum(written.values()), max(written.values())) == (30, 1)

    # As if it had been killed while writing.
    (path / ".spark-staging-1" / "_temporary").mkdir(parents=True)
    report = archive(spark, path, {"nameserver": broker.nameserver, "topic": topic})
    assert not list(path.glob(".spark-staging-*"))
    assert numbers(spark.read.parquet(str(path))) == Counter(range(40))
    assert numbers(read_archive(spark, path)) == Counter(range(40))
    assert report.rows == 25, "the second batch was not recorded, and is written again"


def test_command_archives_and_reports(
    spark: SparkSession,
    broker: Standalone,
    producer: Producer,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    send(producer, topic, range(12))
    line = ["pipeline", "archive", topic, "--to", str(tmp_path / "a"), "--partition-by", "tags"]
    line += ["--checkpoint", str(tmp_path / "progress")]
    line += ["--nameserver", broker.nameserver, "--option", "columns=body,tags,queueOffset"]
    told = CliRunner().invoke(app, [*line, "--json"])
    assert told.exit_code == 0, told.stderr
    report = json.loads(told.stdout)
    assert (report["rows"], report["body_bytes"], report["first_stored_ms"]) == (12, 14, None)
    assert "messages archived: " in told.stderr
    assert report["checkpoint"] == str(tmp_path / "progress")
    assert (tmp_path / "progress" / "commits").is_dir()
    assert not (tmp_path / "a" / "_checkpoint").exists()
    frame = read_archive(spark, tmp_path / "a")
    assert numbers(frame.where("tags = 'odd'")) == Counter(range(1, 12, 2))

    other = CliRunner().invoke(app, [part if part != "tags" else "queueOffset" for part in line])
    assert other.exit_code == 2
    assert "is partitioned by tags" in other.stderr
    fewer = CliRunner().invoke(app, [part.replace(",queueOffset", "") for part in line])
    assert fewer.exit_code == 2
    assert "got body,tags: use the same" in fewer.stderr
    assert "has the columns body,tags,queueOffset, got" in fewer.stderr
    missing = CliRunner().invoke(app, ["pipeline", "archive", f"{topic}x", *line[3:]])
    assert missing.exit_code == 1
    assert f"similar: {topic}" in missing.stderr


def test_invalid_options_are_named(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    source = {"nameserver": broker.nameserver, "topic": "TBW102", "columns": "topic,body"}
    with pytest.raises(
        InvalidArgument, match="partition_by must be columns of topic, got 'topic,date'"
    ):
        archive(spark, tmp_path, source)
    with pytest.raises(InvalidArgument, match="nonsense"):
        archive(spark, tmp_path, {**source, "nonsense": "1"})
    with pytest.raises(InvalidArgument, match="is empty"):
        read_archive(spark, tmp_path)
    with pytest.raises(InvalidArgument, match="does not exist"):
        read_archive(spark, tmp_path / "nowhere")
    with pytest.raises(InvalidArgument, match="must be a local or mounted directory"):
        compact(spark, "s3a://bucket/archive")
    with pytest.raises(
        InvalidArgument, match="target_bytes must be a whole number, 1 or more, got 0"
    ):
        compact(spark, tmp_path, target_bytes=0)
