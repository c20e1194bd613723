"""Arguments of several pipelines: checked first, so that mistakes are reported immediately."""

from __future__ import annotations

from datetime import UTC, datetime

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its conventional name
from pyspark.sql.column import Column

from turbopump.errors import InvalidArgument

_CONNECT = "pyspark.sql.connect."


def require_driver(spark: SparkSession, pipeline: str) -> None:
    """Raise InvalidArgument if Spark's driver is remote, as with Spark Connect.

    By name: importing the classes of such sessions requires optional packages.
    """
    if any(each.__module__.startswith(_CONNECT) for each in type(spark).__mro__):
        raise InvalidArgument(
            f"{pipeline} does not run on Spark Connect: it needs the driver in its own process; "
            'use a session of turbopump.spark.session(master="local[*]"), or of another master'
        )


def require_count(name: str, value: object) -> None:
    """Raise InvalidArgument unless it is a valid number of repetitions."""
    if not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{name} must be a whole number, 1 or more, got {value!r}")


# --- time ranges and windows ----------------------------------------------------------------------


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
