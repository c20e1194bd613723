"""Progress and reports, as users and programs see them."""

from __future__ import annotations

import io
from dataclasses import dataclass

import msgspec
import pytest

from turbopump.spark.pipelines.progress import Lines, Step, shown
from turbopump.spark.pipelines.reports import (
    Table,
    as_json,
    bytes_text,
    facts,
    per_second,
    timestamp,
)
from turbopump.spark.pipelines.spark_errors import reason


def test_lines_are_written_periodically() -> None:
    out, now = io.StringIO(), [0.0]
    watch = Lines(out, now_s=lambda: now[0])
    for second in range(12):
        now[0] = float(second)
        watch(Step("messages archived", second * 1000, 20_000))
    watch(Step("starting Spark"))
    watch(Step("folders merged", 0))
    watch(Step("folders merged", 0))
    watch(Step("folders merged", 1, 2))
    watch(Step("folders merged", 2, 2))
    watch(Step("folders merged", 2, 2))
    assert out.getvalue().splitlines() == [
        "messages archived: 0 of 20,000",
        "messages archived: 5,000 of 20,000",
        "messages archived: 10,000 of 20,000",
        "starting Spark",
        "folders merged: 0",
        "folders merged: 2 of 2",
    ]


def test_unchanged_progress_is_reported_once() -> None:
    out, now = io.StringIO(), [0.0]
    watch = Lines(out, now_s=lambda: now[0])
    for second in range(100):
        now[0] = float(second)
        watch(Step("messages archived", 7))
    assert out.getvalue() == "messages archived: 7\n"


def test_a_terminal_gets_a_bar_and_other_outputs_lines() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        with shown(out) as watch:
            watch(Step("messages sent", 3, 10))
    assert "\x1b[" in terminal.getvalue()
    assert file.getvalue() == "messages sent: 3 of 10\n"


@dataclass(frozen=True, slots=True)
class Sample:
    rows: int
    topics: tuple[str, ...]

    def tables(self) -> tuple[Table, ...]:
        return (facts("sample", rows_written=self.rows),)


def test_report_is_one_json_object() -> None:
    text = as_json(Sample(3, ("a", "b")))
    assert "\n" not in text
    assert msgspec.json.decode(text) == {"rows": 3, "topics": ["a", "b"]}


def test_facts_have_readable_names() -> None:
    (table,) = Sample(3, ()).tables()
    assert table.rows == (("rows written", 3),)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, None),
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2, "1.0 MiB"),
        (5 * 1024**4, "5.0 TiB"),
        (3 * 1024**5, "3,072.0 TiB"),
    ],
)
def test_bytes_have_a_unit_that_suits(count: int | None, text: str | None) -> None:
    assert bytes_text(count) == text


def test_no_time_gives_no_rate() -> None:
    assert per_second(5, 0.0) is None
    assert per_second(5, 2.0) == 2.5


def test_timestamps_are_in_utc() -> None:
    found = timestamp(1_700_000_000_000)
    assert found is not None
    assert found.isoformat() == "2023-11-14T22:13:20+00:00"
    assert timestamp(None) is None


TRACE = """[STREAM_FAILED] Query terminated with exception: Job aborted
Traceback (most recent call last):
  File "source.py", line 3, in partitions
turbopump.errors.DataLost: orders@a:0 from 3 to 5 is gone
\tat org.apache.spark.Something(Some.scala:1)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TRACE, ("DataLost", "orders@a:0 from 3 to 5 is gone")),
        ("Error\n  File x\nValueError: no number\n", ("ValueError", "no number")),
        ("\nThe first line.\nmore", ("", "The first line.")),
        ("", ("", "no reason given")),
    ],
)
def test_reason_is_found_in_a_trace(text: str, expected: tuple[str, str]) -> None:
    assert reason(text) == expected
