"""Options and ranges that an older driver pickled still open on newer executors."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.partition_planner import QueueRange
from turbopump.spark.writing.options import SinkOptions

_DATA = Path(__file__).parents[2] / "data" / "spark" / "pickles-0.1.json"
_PARSED: dict[str, Any] = {
    "stream": SourceOptions.for_stream,
    "batch": SourceOptions.for_batch,
    "sink": SinkOptions.parse,
}


def _opened(name: str) -> tuple[Any, Any]:
    saved = json.loads(_DATA.read_text())[name]
    return saved["options"], pickle.loads(base64.b64decode(saved["pickle"]))


@pytest.mark.parametrize("name", sorted(_PARSED))
def test_options_pickled_by_0_1_equal_the_ones_parsed_now(name: str) -> None:
    options, opened = _opened(name)
    assert opened == _PARSED[name](options)
    assert pickle.loads(pickle.dumps(opened)) == opened


def test_a_partition_pickled_by_0_1_opens() -> None:
    _, opened = _opened("partition")
    assert opened == (QueueRange("orders", "broker-a", 0, 3, 9),)
