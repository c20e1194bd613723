from __future__ import annotations

import io
import json
from typing import Any

import pytest

from turbopump.filters.__main__ import BAD_INPUT, main
from vectors import load


def evaluated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *lines: str
) -> tuple[int, list[dict[str, Any]], str]:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    code = main(["eval"])
    printed = capsys.readouterr()
    return code, [json.loads(line) for line in printed.out.splitlines()], printed.err


def test_a_line_for_each_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, verdicts, _ = evaluated(
        monkeypatch,
        capsys,
        '{"expression": "a > 5", "properties": {"a": "7"}}',
        "",
        '{"expression": "a > 5", "properties": {}}',
        '{"expression": "a > 5", "properties": {"a": "x"}}',
        '{"expression": "a >", "properties": {"a": "x"}}',
        '{"expression": "a IS NULL"}',
    )
    assert code == 0
    assert verdicts == [
        {"compile": "ok", "error": None, "result": True, "match": True},
        {"compile": "ok", "error": None, "result": None, "match": False},
        {
            "compile": "ok",
            "error": "expected a 32-bit integer, found 'x'",
            "result": "error",
            "match": False,
        },
        {
            "compile": "error",
            "error": "expected a property name, a constant or (, found end of expression"
            " (at character 4)",
            "result": None,
            "match": False,
        },
        {"compile": "ok", "error": None, "result": True, "match": True},
    ]


def test_golden_cases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    golden = load("sql92.json")
    asked, expected = [], []
    for case in golden["cases"]:
        for each in case.get("evaluations", [{"properties": "none", "result": None}]):
            given = golden["properties"][each["properties"]]
            asked.append(json.dumps({"expression": case["expr"], "properties": given}))
            expected.append((case["compile"], each["result"], each.get("match", False)))
    code, verdicts, _ = evaluated(monkeypatch, capsys, *asked)
    assert code == 0
    assert [(each["compile"], each["result"], each["match"]) for each in verdicts] == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nonsense", "line 2: JSON is malformed"),
        ('{"properties": {}}', "line 2: Object missing required field `expression`"),
        ('{"expression": "a", "properties": {"a": 5}}', "line 2: Expected `str`, got `int`"),
    ],
)
def test_bad_lines_are_named(
    line: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, verdicts, error = evaluated(monkeypatch, capsys, '{"expression": "TRUE"}', line)
    assert code == BAD_INPUT
    assert len(verdicts) == 1
    assert error.startswith(reason)
