"""What a type checker finds in programs that use the clients."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[3] / "pyproject.toml"

PROGRAM = """
from turbopump import (
    ConsumeContext, ConsumeResult, MessageQueue, MessageView, PushConsumer, Worker, aio, consumer
)

Messages = list[MessageView]

def returns(messages: Messages, context: ConsumeContext) -> ConsumeResult:
    return ConsumeResult.SUCCESS

async def returns_later(messages: Messages, context: ConsumeContext) -> ConsumeResult:
    return ConsumeResult.SUCCESS

def forgets(messages: Messages, context: ConsumeContext) -> ConsumeResult:  # error: return
    print(messages)

def forgets_once(messages: Messages, context: ConsumeContext) -> ConsumeResult:  # error: return
    if messages:
        return ConsumeResult.SUCCESS

def says_none(messages: Messages, context: ConsumeContext) -> None:
    print(messages)

async def says_none_later(messages: Messages, context: ConsumeContext) -> None:
    print(messages)

PushConsumer("g", returns)
PushConsumer("g", lambda messages, context: ConsumeResult.SUCCESS)
aio.PushConsumer("g", returns_later)
PushConsumer("g", says_none)  # error: arg-type
PushConsumer("g", lambda messages, context: print(messages))  # error: arg-type
aio.PushConsumer("g", says_none_later)  # error: arg-type

class Chooses:
    def keeps(self, group: str, message: MessageView, queue: MessageQueue) -> bool:
        return True

@consumer("orders", group="g")
def bill(order: bytes) -> None: ...

PushConsumer("g", returns, hooks=[Chooses()])
Worker(bill, hooks=[Chooses()])
aio.Worker(bill, hooks=[Chooses()])
Worker(bill, hooks=[bill])  # error: list-item
"""


def errors_of(program: str, directory: Path) -> dict[int, str]:
    """Return the errors that mypy's strict mode reports, by line."""
    path = directory / "program.py"
    path.write_text(program, encoding="utf-8")
    options = [f"--config-file={CONFIG}", f"--cache-dir={directory / 'cache'}", "--no-pretty"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(path)],
        cwd=CONFIG.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"program\.py:(\d+): error: .* \[([\w-]+)\]$", done.stdout, re.MULTILINE)
    assert len(found) == done.stdout.count("error:"), done.stdout
    return {int(line): code for line, code in found}


@pytest.mark.slow
def test_forgotten_returns_of_listeners_and_wrong_hooks_are_found(tmp_path: Path) -> None:
    lines = enumerate(PROGRAM.splitlines(), 1)
    marked = {number: line.partition("# error: ")[2] for number, line in lines if "# error" in line}
    assert errors_of(PROGRAM, tmp_path) == marked
