"""Commands as typed into a shell, and their output compared with recorded snapshots."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from turbopump.cli.app import app

GUIDE = Path(__file__).parents[1] / "docs" / "guide" / "commands.md"
SNAPSHOTS = Path(__file__).parent / "integration" / "snapshots"
UPDATE = "TURBOPUMP_UPDATE_SNAPSHOTS"
"""If set to 1, tests update the snapshots instead of comparing with them."""

_MASKS = (
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"), "YYYY-MM-DDThh:mm:ss"),
    (re.compile(r"127\.0\.0\.1:\d{5}"), "127.0.0.1:PPPPP"),
    (re.compile(r"\b[0-9A-F]{32}\b"), "I" * 32),
    (re.compile(r"\b[0-9A-F]{16}\b"), "I" * 16),
    (re.compile(r"(?<=V4_9_8).*$", re.MULTILINE), "  FIGURES"),
    (re.compile(r", \d+m?s late"), ", TIME late"),
)
_DELAY = re.compile(r" +\d+m?s(?= )")
"""A value in a column as wide as its title, so that its width never changes."""


class Shell:
    """Runs commands as a user would type them."""

    def __init__(self, nameserver: str) -> None:
        self.nameserver = nameserver
        self.lines: list[str] = []

    def run(self, line: str, stdin: str | bytes | None = None) -> Result:
        env = {"NAMESRV_ADDR": self.nameserver, "COLUMNS": "80"}
        return CliRunner().invoke(app, shlex.split(line), input=stdin, env=env)

    def ok(self, line: str, stdin: str | bytes | None = None) -> str:
        result = self.run(line, stdin)
        assert result.exit_code == 0, (line, result.stderr, result.exception)
        return result.stdout

    def json(self, line: str) -> Any:
        """Return the single object that a command prints."""
        (found,) = self.json_lines(line)
        return found

    def json_lines(self, line: str) -> list[Any]:
        """Return the objects that a command prints; all their keys must be documented."""
        found = [json.loads(text) for text in self.ok(f"{line} --json").splitlines()]
        words = " ".join(line.split()[:2])
        if words != "cluster info":
            for value in found:
                assert keys_of(value) <= documented_keys(words), words
        return found

    def keep(self, line: str, stdin: str | bytes | None = None) -> None:
        """Run a command and record its output."""
        result = self.run(line, stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), line
        self.lines += [f"$ turbopump {line}", *result.output.splitlines()]
        if result.exit_code:
            self.lines.append(f"[exit {result.exit_code}]")
        self.lines.append("")

    def compare(self, name: str) -> None:
        """Compare all recorded output with the snapshot."""
        text = masked("\n".join(self.lines))
        path = SNAPSHOTS / f"{name}.txt"
        if os.environ.get(UPDATE) == "1":
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"run with {UPDATE}=1 to update {path}"


def masked(text: str) -> str:
    """Replace values that differ between runs with masks of the same width."""
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return _DELAY.sub(lambda found: "TIME".rjust(len(found[0])), text)


def wait_for(fact: Any, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.02)


def documented_keys(words: str) -> set[str]:
    """Return the keys that the guide documents for a command's JSON."""
    guide = GUIDE.read_text()
    section = guide.partition(f"\n### `turbopump {words}`\n")[2].partition("\n##")[0]
    text = section[re.search(r"\bJSON\b", section).start() :]  # type: ignore[union-attr]
    keys = set(re.findall(r"`(\w+)`", text))
    message_keys = set(re.findall(r"`(\w+)`", paragraph(guide, "Messages have these keys")))
    letter_keys = set(re.findall(r"`(\w+)`", paragraph(guide, "of a message in JSON, and:")))
    if "messages." in text:
        keys |= message_keys
    if "letter" in text:
        keys |= message_keys | letter_keys
    if "transaction" in text:
        keys |= message_keys
        keys |= set(
            re.findall(r"`(\w+)`", paragraph(guide, "A transaction has the keys of a message"))
        )
    return keys


def paragraph(guide: str, start: str) -> str:
    return guide.partition(start)[2].partition("\n\n")[0]


def keys_of(value: Any) -> set[str]:
    """Return all keys of a value, including those of objects in lists and in before and after."""
    found = set()
    for key, item in value.items():
        found.add(key)
        inner = item if isinstance(item, list) else [item] if key in {"before", "after"} else []
        for each in inner:
            found |= keys_of(each) if isinstance(each, dict) else set()
    return found
