"""What pipelines refuse before they do anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from turbopump.errors import InvalidArgument
from turbopump.spark import pipelines

NOBODY = "127.0.0.1:1"
SOURCE = {"nameserver": NOBODY, "topic": "orders"}

# Spark's own needs packages that PySpark does not bring; `test_modes` has one.
connect_session: Any = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
no_session: Any = None


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("archive", lambda spark: pipelines.archive(spark, "x", SOURCE)),
        ("compact", lambda spark: pipelines.compact(spark, "x")),
        ("lag", lambda spark: pipelines.lag(spark, NOBODY)),
        ("read_archive", lambda spark: pipelines.read_archive(spark, "x")),
        ("redrive", lambda spark: pipelines.redrive(spark, "billing", NOBODY)),
        ("replay", lambda spark: pipelines.replay(spark, "x", {"nameserver": NOBODY}, {"*": "y"})),
        ("trace", lambda spark: pipelines.trace(spark, SOURCE)),
    ],
)
def test_connect_is_refused_with_what_to_do(name: str, call: Callable[[Any], object]) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{name} .* Spark Connect.*session\(master="):
        call(connect_session)


@pytest.mark.parametrize("every_s", [-1, float("nan"), float("inf"), 1e300])
def test_bad_intervals_are_named(every_s: float) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"every_s is {every_s}: ")):
        pipelines.archive(no_session, "x", SOURCE, every_s=every_s)
    with pytest.raises(InvalidArgument, match=re.escape(f"every_s is {every_s}: ")):
        pipelines.lag(no_session, NOBODY, every_s=every_s)
