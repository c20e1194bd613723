"""Time ranges and windows of pipelines: checked before a query runs, then applied to its rows."""

from __future__ import annotations

from datetime import UTC, datetime

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its conventional name
from pyspark.sql.column import Column

from turbopump.errors import InvalidArgument


def to_utc(name: str, value: datetime | None) -> datetime | None:
    """Return a time bound in UTC; without a time zone it is local, as in Python."""
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise InvalidArgument(
            f"{name} must be a datetime (local time without a zone), got {value!r}"
        )
    return value.astimezone(UTC)


def between(
    frame: DataFrame, time: Column, since: datetime | None, until: datetime | None
) -> DataFrame:
    """Return the rows with a time from ``since`` to before ``until``; None is no bound."""
    if since is not None:
        frame = frame.where(time >= F.lit(since))
    return frame if until is None else frame.where(time < F.lit(until))


def require_window(spark: SparkSession, window: str) -> None:
    """Raise InvalidArgument unless Spark can parse the length of a window; runs no job."""
    try:
        spark.range(0).select(F.window(F.timestamp_millis("id"), window))
    except PySparkException as error:
        raise InvalidArgument(
            f"window must be a length such as '30 seconds', '5 minutes' or '1 day', not months or "
            f"years, got {window!r}"
        ) from error


def window_ms(window: str | None) -> Column:
    """Return the start of the window of each ``time_ms``, null without windows."""
    if window is None:
        return F.lit(None).cast("long")
    return F.unix_millis(F.window(F.timestamp_millis("time_ms"), window)["start"])
