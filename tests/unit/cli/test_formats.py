"""How timestamps, queues and values are parsed and formatted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from turbopump.cli import output
from turbopump.cli.formats import (
    format_body,
    format_duration,
    format_number,
    format_percent,
    format_time,
    format_value,
    parse_pairs,
    parse_queues,
    parse_time,
)
from turbopump.cli.output import Column, Output, columns, plain_table, width_needed
from turbopump.errors import InvalidArgument
from turbopump.message import MessageQueue

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("now", NOW),
        ("15m", NOW - timedelta(minutes=15)),
        ("2h ago", NOW - timedelta(hours=2)),
        ("-1d", NOW - timedelta(days=1)),
        ("500ms", NOW - timedelta(milliseconds=500)),
        ("2026-03-01T11:00:00+00:00", NOW - timedelta(hours=1)),
        ("2026-03-01T11:00Z", NOW - timedelta(hours=1)),
        ("1772362800000", NOW - timedelta(hours=1)),
    ],
)
def test_timestamps_are_parsed(text: str, moment: datetime) -> None:
    assert parse_time(text, NOW) == moment


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "12:00",
        "15",
        "15 weeks",
        "2026-13-01",
        "9" * 23,
        "9" * 5000,
        "999999999999d",
        "999999d",
        "0001-01-01T00:00:00+14:00",
    ],
)
def test_invalid_timestamps_are_rejected(text: str) -> None:
    with pytest.raises(
        InvalidArgument, match=r"time must be now, 2026-03-01T12:00:00, 15m .* got '"
    ):
        parse_time(text, NOW)


def test_times_are_local_and_can_be_read_back() -> None:
    text = format_time(1_772_366_400_000)
    assert len(text) == 19
    assert parse_time(text, NOW) == NOW
    assert parse_time("2026-03-01T12:00:00", NOW) == datetime(2026, 3, 1, 12).astimezone()
    assert format_time(None) == "-"
    assert format_time(2**62) == str(2**62)


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (0, "0ms"),
        (999, "999ms"),
        (1000, "1s"),
        (61_000, "1m01s"),
        (3_600_000, "1h00m"),
        (90_061_000, "1d01h"),
        (None, "-"),
    ],
)
def test_durations_are_written_by_two_units(duration_ms: int | None, text: str) -> None:
    assert format_duration(duration_ms) == text


def test_values_are_written_for_people() -> None:
    assert [format_number(number) for number in (12345, 0.25, None)] == ["12345", "0.2", "-"]
    assert [format_percent(part) for part in (0.256, None)] == ["26%", "-"]
    values: tuple[object, ...] = (None, "", True, False, ["a", "b"], [], 7)
    assert [format_value(value) for value in values] == ["-", "-", "yes", "no", "a, b", "-", "7"]


def test_untrusted_text_cannot_control_a_terminal() -> None:
    assert format_value("a\x1b[2Jb\nc\udcff") == r"a\x1b[2Jb\nc\udcff"
    assert format_value(["x=\r", "y"]) == r"x=\r, y"


def test_bodies_are_written_on_one_line() -> None:
    assert format_body(b"hello") == "hello"
    assert format_body(b"a\nb\t\x1b[31m") == r"a\nb\t\x1b[31m"
    assert format_body("ä".encode()) == "ä"
    assert format_body(b"\xff" * 3) == "<3 bytes: ffffff>"
    assert format_body(b"x" * 100, 10) == "x" * 9 + "…"


QUEUES = [MessageQueue("T", broker, number) for broker in "ab" for number in range(2)]


def test_queues_are_read() -> None:
    assert parse_queues([], QUEUES) is None
    assert parse_queues(["a:1"], QUEUES) == [MessageQueue("T", "a", 1)]
    assert parse_queues(["0", "a:0"], QUEUES) == [MessageQueue("T", b, 0) for b in "ab"]


@pytest.mark.parametrize("text", ["c:0", "a:2", "x", ""])
def test_invalid_queues_are_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"does not exist; there are a:0, a:1, b:0, b:1"):
        parse_queues([text], QUEUES)


def test_pairs_are_read() -> None:
    assert parse_pairs(["a=1", "b = x=y"], "setting") == {"a": "1", "b": " x=y"}
    for text in ("a", "=1"):
        with pytest.raises(InvalidArgument, match=r"setting must be name=value"):
            parse_pairs([text], "setting")


def test_numbers_are_right_aligned() -> None:
    columns = (Column("name", "NAME"), Column("count", "N", "number"), Column("last", "LAST"))
    rows = [{"name": "a", "count": 5, "last": None}, {"name": "longer", "count": 1234, "last": "x"}]
    assert list(plain_table(rows, columns)) == [
        "NAME       N  LAST",
        "a          5  -",
        "longer  1234  x",
    ]


def test_tables_that_do_not_fit_become_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = (Column("stored", "STORED", "time"), Column("id", "ID", "id"), Column("b", "BODY"))
    rows = [{"stored": 0, "id": "F" * 32, "b": "hello"}] * 2
    needed = width_needed(rows, columns)
    assert needed == 19 + 2 + 16 + 2 + 5
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    for width, is_table in ((needed, True), (needed - 1, False), (10, False)):
        monkeypatch.setenv("COLUMNS", str(width))
        Output(as_json=False).rows(rows, columns, nothing="")
        printed = capsys.readouterr().out
        assert printed.count("STORED") == (1 if is_table else 2)
        assert ("F" * 32 in printed) is not is_table
        assert printed.count("hello") == 2


def test_no_width_of_a_terminal_cuts_a_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = columns("topic queue:number offset:number tags keys id:id body")
    first = {"topic": "orders", "queue": 0, "offset": 1234, "tags": "created", "keys": "k" * 24}
    row = {**first, "id": "F" * 32, "body": '{"number":5,"customer":"c1","note":"x"}'}
    needed = width_needed([row], shown)
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    for width in range(needed, needed + 80):
        monkeypatch.setenv("COLUMNS", str(width))
        Output(as_json=False).rows([row], shown, nothing="")
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        # Every character of every cell, wherever it was folded to.
        cells = "".join(column.title + column.text(row) for column in shown)
        assert sorted("".join(lines).replace(" ", "")) == sorted(cells)


def test_wide_characters_are_not_folded_where_they_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "100")
    Output(as_json=False).rows([{"body": "订单已创建" * 4}], columns("body"), nothing="")
    assert capsys.readouterr().out.splitlines()[1].rstrip() == "订单已创建" * 4


def test_unknown_numbers_are_not_shown_as_none() -> None:
    rows: list[dict[str, int | None]] = [{"lag": 5}, {"lag": None}]
    assert list(plain_table(rows, columns("lag:known"))) == ["    LAG", "      5", "unknown"]
