"""The progress display while executors send continues after errors, and ends with its context."""

from __future__ import annotations

import threading

import pytest

from turbopump.client.config import ClientConfig
from turbopump.spark.pipelines import send_progress
from turbopump.spark.pipelines.progress import Step
from turbopump.spark.pipelines.send_progress import SendProgress


def test_the_display_continues_after_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turbopump.supervisor.BACKOFF_FIRST_MS", 1)
    monkeypatch.setattr(send_progress, "_POLL_INTERVAL_S", 0.001)
    counts: list[int | Exception] = [LookupError("one"), 10, LookupError("two"), 12, 15]
    shown: list[Step] = []
    is_shown = threading.Event()

    def count(_self: SendProgress) -> int:
        found = counts.pop(0) if len(counts) > 1 else counts[0]
        if isinstance(found, Exception):
            raise found
        return found

    def watch(step: Step) -> None:
        shown.append(step)
        if step.done == 5:
            is_shown.set()

    monkeypatch.setattr(SendProgress, "_stored", count)
    with SendProgress(ClientConfig("127.0.0.1:1"), ["T"], "sending", 8, watch):
        assert is_shown.wait(30)
    assert [step.done for step in shown if step.done not in (5, 8)] == [2]
    assert shown[-1].done == 8
    assert caplog.text.count("progress of sending failed and is started again") == 2
    assert not any(thread.name == "stored-since" for thread in threading.enumerate())
