"""What pipelines reject before they do anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from turbopump.errors import InvalidArgument
from turbopump.spark import pipelines
from turbopump.spark.pipelines.arguments import to_utc

NOBODY = "127.0.0.1:1"
SOURCE = {"nameserver": NOBODY, "topic": "orders"}

# Spark's own needs packages that PySpark does not include; `test_modes` has one.
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
def test_spark_connect_is_rejected_with_advice(name: str, call: Callable[[Any], object]) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{name} .* Spark Connect.*session\(master="):
        call(connect_session)


@pytest.mark.parametrize(
    "interval", [-1, timedelta(seconds=-1), float("nan"), float("inf"), 1e300, "3"]
)
def test_bad_intervals_are_named(interval: Any) -> None:
    error = "interval must be (at least 0|0–2147483.647) seconds, as a number or a timedelta, got"
    with pytest.raises(InvalidArgument, match=error):
        pipelines.archive(no_session, "x", SOURCE, interval=interval)
    with pytest.raises(InvalidArgument, match=error):
        pipelines.lag(no_session, NOBODY, interval=interval)


def test_lag_needs_an_interval() -> None:
    nothing: Any = None
    with pytest.raises(InvalidArgument, match=r"interval must be at least 0 seconds.* got None"):
        pipelines.lag(no_session, NOBODY, interval=nothing)


@pytest.mark.parametrize("count", ["3", 1.5, 0, None])
def test_bad_counts_are_named(count: Any, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=f"samples must be a whole number, 1 or more, got {count!r}"
    ):
        pipelines.lag(no_session, NOBODY, samples=count)
    with pytest.raises(
        InvalidArgument, match=f"target_bytes must be a whole number, 1 or more, got {count!r}"
    ):
        pipelines.compact(no_session, tmp_path, target_bytes=count)


def test_bounds_without_a_zone_are_local_times(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Kathmandu")
        time.tzset()
        local = to_utc("since", datetime(2026, 1, 2, 3, 4))  # noqa: DTZ001 - without a zone
    time.tzset()
    assert local == datetime(2026, 1, 1, 21, 19, tzinfo=UTC)
    zoned = datetime(2026, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=1)))
    assert to_utc("since", zoned) == zoned
    assert to_utc("since", None) is None


def test_bounds_that_are_no_times_are_named() -> None:
    wrong: Any = "2026-01-02"
    with pytest.raises(InvalidArgument, match=r"since must be a datetime .*, got '2026-01-02'"):
        pipelines.replay(no_session, "x", {"nameserver": NOBODY}, {"*": "y"}, since=wrong)
    with pytest.raises(InvalidArgument, match=r"until must be a datetime .*, got '2026-01-02'"):
        pipelines.redrive(no_session, "billing", NOBODY, until=wrong)
    with pytest.raises(InvalidArgument, match=r"until must be a datetime .*, got '2026-01-02'"):
        pipelines.trace(no_session, SOURCE, until=wrong)


@pytest.mark.parametrize(
    "call",
    [
        lambda path: pipelines.archive(no_session, path, SOURCE),
        lambda path: pipelines.compact(no_session, path),
    ],
    ids=["archive", "compact"],
)
def test_files_of_sparks_own_sink_are_not_touched(
    call: Callable[[Path], object], tmp_path: Path
) -> None:
    """Spark would read nothing of an archive there, without an error."""
    (tmp_path / "_spark_metadata").mkdir()
    with pytest.raises(InvalidArgument, match=r"Spark's file sink.*choose another directory"):
        call(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["_spark_metadata"]
