from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from appending import append_all
from example_counts import in_long_runs
from offline_stores import (
    BORN_MS,
    HERE,
    Row,
    as_inspected,
    inspected,
    looks_like_a_record,
    message,
    parts_of,
    position_of,
    reader_of,
    rows_of,
    unpacked,
    written,
)
from turbopump.errors import InvalidArgument, StoreDamaged, StoreInUse
from turbopump.spark.offline import log_reader as store_walk
from turbopump.spark.offline.options import OPTIONS, StoreOptions
from turbopump.spark.offline.source import DefaultSource
from turbopump.spark.records.schema import COLUMNS
from turbopump.store import Store, StoreConfig
from turbopump.wire.record import Record, encode_blank

SEGMENT_BYTES = 4096
COUNT = 60


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return written(tmp_path / "store", map(message, range(COUNT)), SEGMENT_BYTES)


def log_files(store: Path) -> list[Path]:
    return sorted((store / "commitlog").iterdir())


def offsets(store: Path, **options: object) -> list[int]:
    return [row["queueOffset"] for row in rows_of(store, **options)]


GOLDEN = [
    "store_trimmed",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("store", "store_crash", "store_v6")),
]


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("part_bytes", [1 << 30, 3000])
def test_a_brokers_store_is_read_completely(name: str, part_bytes: int, tmp_path: Path) -> None:
    store = unpacked(name, tmp_path)
    rows = rows_of(store, includeInternal=True, bytesPerPartition=part_bytes)
    wanted = inspected(store)
    for one in wanted:
        one.pop("bodyHex")
    assert [as_inspected(row, position_of(row)) for row in rows] == wanted
    assert {row["broker"] for row in rows} == {"broker-a"}


def test_bodies_are_as_their_senders_gave_them(tmp_path: Path) -> None:
    store = unpacked("store", tmp_path)
    rows = rows_of(store, includeInternal=True, columns="body,sysFlag")
    wanted = [bytes.fromhex(one["bodyHex"]) for one in inspected(store)]
    plain = [number for number, row in enumerate(rows) if not row["sysFlag"] & 1]
    assert [rows[number]["body"] for number in plain] == [wanted[number] for number in plain]
    assert len(plain) < len(rows)
    assert all(
        len(rows[number]["body"]) > len(wanted[number])
        for number in set(range(len(rows))) - set(plain)
    )


def test_a_store_written_here(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", StoreConfig(segment_bytes=4096)) as opened:
        append_all(opened, [[message(number)] for number in range(20)])[-1].durable.result()
        with pytest.raises(StoreInUse, match="stop it, or read a copy"):
            rows_of(tmp_path / "store")
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
    assert (tmp_path / "copy" / "abort").exists()
    assert rows_of(tmp_path / "copy") == rows_of(tmp_path / "store")
    assert [row["keys"] for row in rows_of(tmp_path / "copy")] == [f"k{n}" for n in range(20)]


@pytest.mark.slow
def test_a_store_that_a_java_broker_has_open_is_rejected(store: Path) -> None:
    (store / "lock").write_bytes(b"lock")
    lines = (
        "import fcntl, sys",
        "file = open(sys.argv[1], 'r+')",
        "fcntl.lockf(file, fcntl.LOCK_EX)",
        "print(flush=True)",
        "sys.stdin.read()",
    )
    holding = [sys.executable, "-c", "\n".join(lines), str(store / "lock")]
    with subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        with pytest.raises(StoreInUse):
            rows_of(store)
        process.stdin.close()
    assert len(rows_of(store)) == COUNT


def test_nothing_is_written(store: Path) -> None:
    for path in sorted(store.rglob("*"), reverse=True):
        path.chmod(0o500 if path.is_dir() else 0o400)
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    assert len(rows_of(store)) == COUNT
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before


def test_parts_of_any_size_have_the_same_rows(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows_of(store, bytesPerPartition="1g")
    assert [row["queueOffset"] for row in whole] == list(range(COUNT))
    for part_bytes in (1, 333, 2048, 4095, 4096):
        parts = parts_of(store, bytesPerPartition=part_bytes)
        assert [row for part in parts for row in part] == whole
        if part_bytes == 1:
            assert max(map(len, parts)) == 1
    # So small that records extend beyond the end of a single read.
    monkeypatch.setattr(store_walk, "READ_BYTES", 50)
    assert rows_of(store, bytesPerPartition=1000) == whole


@pytest.mark.parametrize("rows_max", [1, 7, 10_000])
def test_batches_have_at_most_the_configured_rows(store: Path, rows_max: int) -> None:
    reader = reader_of(store, {"maxRowsPerBatch": rows_max, "columns": "queueOffset"})
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert max(batch.num_rows for batch in batches) <= rows_max
    assert sum(batch.num_rows for batch in batches) == COUNT


def test_small_batches_are_combined(store: Path) -> None:
    reader = reader_of(store, {"maxRowsPerBatch": 40, "tags": "even", "columns": "tags"})
    counts = [[batch.num_rows for batch in reader.read(part)] for part in reader.partitions()]
    assert all(len(part) == 1 for part in counts)


@pytest.mark.parametrize("part_bytes", [1 << 30, 500])
@pytest.mark.parametrize(
    "cut", [1, 40, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (0, 5, 87, 100))]
)
@pytest.mark.parametrize("fill", [b"", b"\0", b"\xee"])
def test_a_torn_end_is_omitted(
    store: Path, cut: int, fill: bytes, part_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = rows_of(store)
    last = log_files(store)[-1]
    end = position_of(whole[-1]) - int(last.name) + cut
    content = last.read_bytes()
    last.write_bytes(content[:end] + fill * (len(content) - end))
    wanted = whole[:-1]
    assert rows_of(store, bytesPerPartition=part_bytes) == wanted
    # The first byte of a record is zero: one that has only this does not exist yet.
    torn = cut > 1 or fill == b"\xee"
    assert ("the log ends there" in caplog.text) == torn


def test_the_log_ends_at_the_first_damage_of_its_last_file(store: Path) -> None:
    whole = rows_of(store)
    last = log_files(store)[-1]
    in_last = [row for row in whole if position_of(row) >= int(last.name)]
    damaged = bytearray(last.read_bytes())
    at = position_of(in_last[1]) - int(last.name)
    damaged[at + 100] ^= 0xFF
    last.write_bytes(damaged)
    wanted = whole[: whole.index(in_last[1])]
    for part_bytes in (1 << 30, 500, 1):
        assert rows_of(store, bytesPerPartition=part_bytes) == wanted
    assert rows_of(store, onBadRecord="skip") == [row for row in whole if row is not in_last[1]]


def test_properties_that_never_reached_the_disk_end_the_log(store: Path) -> None:
    whole = rows_of(store)
    last = log_files(store)[-1]
    damaged = bytearray(last.read_bytes())
    end = position_of(whole[-1]) + whole[-1]["size"] - int(last.name)
    damaged[end - 9 : end] = bytes(9)
    last.write_bytes(damaged)
    assert rows_of(store) == whole[:-1]
    assert rows_of(store, bytesPerPartition=100) == whole[:-1]


def test_zeros_in_properties_are_not_damage_where_more_follows(tmp_path: Path) -> None:
    odd = Record(
        topic=b"T",
        queue_id=0,
        body=b"x",
        properties=b"a\x01\0",
        born_timestamp_ms=BORN_MS,
        born_host=HERE,
        store_host=HERE,
    )
    store = written(tmp_path, [odd, odd, message(2), odd], 4096)
    assert offsets(store) == [0, 1, 2]


def test_damage_in_older_files_is_an_error_unless_skipped(store: Path) -> None:
    whole = rows_of(store)
    first = log_files(store)[0]
    damaged = bytearray(first.read_bytes())
    damaged[position_of(whole[3]) + 4] ^= 0xFF
    damaged[position_of(whole[8]) + 95] ^= 0xFF
    first.write_bytes(damaged)
    for part_bytes in (1 << 30, 700):
        with pytest.raises(StoreDamaged, match=rf"{first.name} at byte .*onBadRecord=skip"):
            rows_of(store, bytesPerPartition=part_bytes)
        wanted = [row for row in whole if row not in (whole[3], whole[8])]
        rows = rows_of(store, onBadRecord="null", bytesPerPartition=part_bytes)
        assert len(rows) == len(whole)
        # For a damaged body the rest is known; for a record without its magic number, nothing is.
        assert {name for name, cell in rows[3].items() if cell is not None} == {
            "broker",
            "size",
            "decodeError",
        }
        same = {**whole[8], "body": None, "decodeError": rows[8]["decodeError"]}
        assert rows[8] == same
        assert rows[8]["decodeError"].endswith("body does not match its checksum")
        assert rows_of(store, onBadRecord="skip", bytesPerPartition=part_bytes) == wanted


def test_an_older_file_that_just_ends_is_damaged(store: Path) -> None:
    whole = rows_of(store)
    first = log_files(store)[0]
    content = first.read_bytes()
    in_first = [row for row in whole if position_of(row) < SEGMENT_BYTES]
    end = position_of(in_first[-1]) + in_first[-1]["size"]
    first.write_bytes(content[:end] + bytes(SEGMENT_BYTES - end))
    with pytest.raises(StoreDamaged, match=f"at byte {end}: unwritten bytes"):
        rows_of(store)
    assert rows_of(store, onBadRecord="skip") == whole


def test_bytes_behind_a_filler_are_not_read(store: Path) -> None:
    whole = rows_of(store)
    first = log_files(store)[0]
    content = bytearray(first.read_bytes())
    in_first = [row for row in whole if position_of(row) < SEGMENT_BYTES]
    # The last three messages of the file are overwritten by a filler, which hides them.
    start = position_of(in_first[-3])
    content[start : start + 8] = encode_blank(SEGMENT_BYTES - start)
    first.write_bytes(content)
    wanted = [row for row in whole if row not in in_first[-3:]]
    for part_bytes in (1 << 30, 500, 1):
        assert rows_of(store, bytesPerPartition=part_bytes) == wanted


def test_a_message_inside_a_body_is_not_read_as_one(tmp_path: Path) -> None:
    inner = looks_like_a_record(999_999)
    records = [message(n, body=inner * 3) for n in range(40)]
    store = written(tmp_path, records, 8192)
    for part_bytes in (1 << 30, 1000, 300):
        assert offsets(store, bytesPerPartition=part_bytes) == list(range(40))


def test_a_message_inside_a_body_with_a_matching_position_does_no_harm(tmp_path: Path) -> None:
    before = message(0, body=b"x" * 1000)
    # The head of a record, and then the body with the forged one in it.
    outer = message(1, body=b"y" * 2000)
    inner_at = before.size + 88 + 1000
    body = (b"y" * 1000 + looks_like_a_record(inner_at)).ljust(2000, b"y")
    forged = message(1, body=body)
    assert forged.size == outer.size
    store = written(tmp_path, [before, forged, *map(message, range(2, 40))], 4096)
    assert offsets(store) == list(range(40))
    with pytest.raises(StoreDamaged, match=r"spans byte .* bytesPerPartition=4096"):
        rows_of(store, bytesPerPartition=inner_at - 10)
    assert offsets(store, bytesPerPartition=4096) == list(range(40))


def test_missing_and_cut_files_are_an_error(store: Path) -> None:
    whole = rows_of(store)
    files = log_files(store)
    files[1].unlink()
    with pytest.raises(StoreDamaged, match="files are missing or cut"):
        rows_of(store)
    start = int(files[1].name)
    wanted = [row for row in whole if not start <= position_of(row) < start + SEGMENT_BYTES]
    assert rows_of(store, onBadRecord="skip") == wanted


def test_foreign_files_are_an_error(store: Path) -> None:
    (store / "commitlog" / "notes.txt").write_text("hello")
    with pytest.raises(StoreDamaged, match=r"notes\.txt is not a file"):
        rows_of(store)
    assert len(rows_of(store, onBadRecord="skip")) == COUNT


def test_preallocated_files_are_skipped(store: Path) -> None:
    end = int(log_files(store)[-1].name) + SEGMENT_BYTES
    (store / "commitlog" / f"{end:020d}").write_bytes(bytes(SEGMENT_BYTES))
    (store / "commitlog" / f"{end + SEGMENT_BYTES:020d}").write_bytes(b"")
    assert len(rows_of(store)) == COUNT


def test_an_empty_store_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    assert rows_of(tmp_path) == []
    Store.open(tmp_path / "store").close()
    assert rows_of(tmp_path / "store") == []


@pytest.mark.parametrize(("make", "wrong"), [(True, "no directory commitlog"), (False, "no such")])
def test_a_directory_that_is_not_a_store_is_rejected(
    make: bool, wrong: str, tmp_path: Path
) -> None:
    path = tmp_path / "elsewhere"
    if make:
        path.mkdir()
    with pytest.raises(InvalidArgument, match=wrong):
        rows_of(path)


TOPICS = [b"orders", b"%RETRY%group", b"SCHEDULE_TOPIC_XXXX", b"RMQ_SYS_TRANS_HALF_TOPIC", b"bills"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [0, 1, 4]),
        ({"includeInternal": "true"}, [0, 1, 2, 3, 4]),
        ({"topic": "bills"}, [4]),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, [2]),
        ({"topics": "bills, orders"}, [0, 4]),
        ({"topicPattern": ".*s"}, [0, 4]),
        ({"topicPattern": "bill"}, []),
        ({"topicPattern": ".*T.*", "includeInternal": "TRUE"}, [1, 2, 3]),
        ({"tags": "even", "topicPattern": "b.*|o.*"}, [0, 4]),
        ({"tags": "odd || none"}, [1]),
        ({"tags": "*"}, [0, 1, 4]),
        ({"startingTime": BORN_MS + 1000}, [1, 4]),
        ({"endingTime": BORN_MS + 4000}, [0, 1]),
        ({"startingTime": "2023-11-14T22:13:21", "endingTime": "2023-11-14T22:13:24Z"}, [1]),
    ],
)
def test_only_requested_data_is_read(
    options: dict[str, Any], wanted: list[int], tmp_path: Path
) -> None:
    records = [message(number, topic) for number, topic in enumerate(TOPICS)]
    assert offsets(written(tmp_path, records, 4096), **options) == wanted


def test_files_of_other_times_are_not_read(tmp_path: Path) -> None:
    hour_ms = 3_600_000
    store = written(tmp_path, map(message, range(COUNT)), 2048, step_ms=hour_ms)
    reader = reader_of(store, {})
    assert len(reader.partitions()) > 3
    times = {"startingTime": BORN_MS + 20 * hour_ms, "endingTime": BORN_MS + 22 * hour_ms}
    assert offsets(store, **times) == [20, 21]
    assert len(reader_of(store, times).partitions()) < len(reader.partitions())


def test_the_broker_can_be_named(store: Path) -> None:
    assert {row["broker"] for row in rows_of(store, columns="broker")} == {""}
    assert {row["broker"] for row in rows_of(store, broker="b7")} == {"b7"}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"topicConfigTable": {"a": 1, "b": {}}}'])
def test_a_broken_list_of_topics_names_no_broker(store: Path, text: str) -> None:
    (store / "config").mkdir()
    (store / "config" / "topics.json").write_text(text)
    assert rows_of(store)[0]["broker"] == ""


def test_a_path_may_be_an_address(store: Path) -> None:
    spaced = store.rename(store.with_name("my store"))
    assert len(rows_of(Path("file:" + str(spaced).replace(" ", "%20")))) == COUNT


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"topik": "a"}, "format rocketmq-store has no option 'topik' .did you mean topic"),
        ({"nameserver": "a"}, "options are path, topic, topics"),
        ({"topic": "a", "topicPattern": "b"}, "topic and topicPattern are mutually exclusive"),
        ({"topic": ""}, "topic must not be empty"),
        ({"topics": "a,,b"}, "topics must not be empty"),
        ({"topicPattern": "("}, "must be a regular expression"),
        ({"includeInternal": "yes"}, "true or false"),
        ({"onBadRecord": "ignore"}, "onBadRecord must be fail or null or skip, got 'ignore'"),
        ({"onBadRecord": "deadletter"}, "onBadRecord=deadLetter needs a broker"),
        ({"tags": "||"}, r"option tags is '\|\|', which has no tag"),
        ({"tags": " "}, "option tags is ' ', which has no tag"),
        ({"topic": "a,b"}, "use option topics for several"),
        ({"tags": " * "}, r"option tags is ' \* ', which asks for a tag named '\*'"),
        ({"columns": "offset"}, "column 'offset'"),
        ({"startingTime": "yesterday"}, "ISO time"),
        ({"startingTime": "2026-01-02", "endingTime": "2026-01-01"}, "must be after"),
        ({"startingTime": "20260131"}, "a timestamp between 1973 and 9999"),
        ({"bytesPerPartition": "0"}, "a size"),
        ({"bytesPerPartition": "many"}, "a size"),
        ({"maxRowsPerBatch": "0"}, "1 or more"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, str], wrong: str, store: Path) -> None:
    with pytest.raises(InvalidArgument, match=wrong):
        rows_of(store, **options)


def test_a_path_is_required() -> None:
    with pytest.raises(InvalidArgument, match="needs the store's directory"):
        StoreOptions.parse({})
    with pytest.raises(InvalidArgument, match="path must not be empty"):
        StoreOptions.parse({"path": ""})


def test_another_schema_is_rejected(store: Path) -> None:
    source = DefaultSource({"path": str(store), "columns": "body"})
    with pytest.raises(InvalidArgument, match="option columns"):
        source.reader(schema=DefaultSource({}).schema())
    assert DefaultSource({}).schema().fieldNames() == list(COLUMNS)


def test_every_option_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs/guide/spark-offline.md").read_text()
    assert [name for name in OPTIONS if f"| `{name}` |" not in text] == []


@pytest.mark.parametrize("last", [False, True])
def test_a_body_that_does_not_inflate(
    store: Path, last: bool, caplog: pytest.LogCaptureFixture
) -> None:
    number = COUNT - 1 if last else 5
    file = log_files(store)[-1 if last else 0]
    content = bytearray(file.read_bytes())
    content[position_of(rows_of(store)[number]) - int(file.name) + 39] |= 1
    file.write_bytes(content)
    with pytest.raises(StoreDamaged, match=rf"offset {number}: body is not .*set onBadRecord"):
        rows_of(store)
    assert len(rows_of(store, columns="queueOffset")) == COUNT
    wanted = [offset for offset in range(COUNT) if offset != number]
    assert offsets(store, onBadRecord="skip") == wanted
    assert (
        f"onBadRecord=skip: topic orders, broker , queue {number % 3}, offset {number}: body"
        in (caplog.text)
    )
    kept = rows_of(store, onBadRecord="null")
    assert [row["queueOffset"] for row in kept if row["body"] is None] == [number]
    assert [row["queueOffset"] for row in kept if row["decodeError"]] == [number]
    assert "not valid ZLIB" in kept[number]["decodeError"]


def outcome(store: Path, **options: object) -> list[Row] | type[StoreDamaged]:
    try:
        return rows_of(store, **options)
    except StoreDamaged:
        return StoreDamaged


def check_any_damage(place: float, value: int, length: int) -> None:
    """Whatever is damaged: how the log is split makes no difference, and nothing is invented."""
    with TemporaryDirectory() as directory:
        store = written(Path(directory), map(message, range(25)), 2048)
        bodies = {row["body"] for row in rows_of(store, columns="body")}
        at = int(place * 2048 * len(log_files(store)))
        damaged = log_files(store)[at // 2048]
        content = bytearray(damaged.read_bytes())
        content[at % 2048 : at % 2048 + length] = bytes([value]) * length
        damaged.write_bytes(content[:2048])
        for handling in ("fail", "skip"):
            results = [
                outcome(
                    store, bytesPerPartition=size, onBadRecord=handling, columns="queueOffset,body"
                )
                for size in (1 << 30, 600, 1)
            ]
            assert results[0] == results[1] == results[2]
            if handling == "skip":
                assert isinstance(results[0], list)
                # A few bytes affect two neighbours at most.
                assert len(results[0]) >= len(bodies) - 2
                # The checksum of a message covers its body, and its position in the log is known.
                assert {row["body"] for row in results[0]} <= bodies


@pytest.mark.slow
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.integers(1, 20))
@example(0.5, 0, 8).via("the last file seems unused")
@example(0.1328125, 0, 10).via("another queue offset, which nothing tells")
@settings(max_examples=in_long_runs(300), deadline=None)
def test_any_damage(place: float, value: int, length: int) -> None:
    check_any_damage(place, value, length)


def test_streams_and_writes_are_rejected(store: Path) -> None:
    source = DefaultSource({"path": str(store)})
    with pytest.raises(InvalidArgument, match=r'use format\("rocketmq"\)'):
        source.streamReader(schema=source.schema())
    for write in (source.writer, source.streamWriter):
        with pytest.raises(InvalidArgument, match="is read-only"):
            write(schema=source.schema(), overwrite=False)


def test_skipped_damage_is_reported(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = log_files(store)[0]
    first.write_bytes(b"\xff" + first.read_bytes()[1:])
    with caplog.at_level(logging.WARNING):
        assert offsets(store, onBadRecord="skip") == list(range(1, COUNT))
    assert "at byte 0" in caplog.text
