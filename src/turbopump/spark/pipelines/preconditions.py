"""What several pipelines look at before they do anything, so that mistakes are told at once."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from numbers import Real

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

from turbopump.errors import InvalidArgument

_CONNECT = "pyspark.sql.connect."


def require_driver(spark: SparkSession, pipeline: str) -> None:
    """Raise InvalidArgument if Spark's driver is elsewhere, as a client of Spark Connect has it.

    By name: importing what such sessions are made of takes packages that need not be there.
    """
    if any(each.__module__.startswith(_CONNECT) for each in type(spark).__mro__):
        raise InvalidArgument(
            f"{pipeline} does not run on Spark Connect, because it needs Spark's driver in its own "
            "process: run it in a program of its own with a session of "
            'turbopump.spark.session(master="local[*]"), or of another master'
        )


def require_interval(every_s: float) -> None:
    """Raise InvalidArgument unless one can wait so long, and so often."""
    if not (isinstance(every_s, Real) and 0 <= every_s <= threading.TIMEOUT_MAX):
        raise InvalidArgument(f"every_s is {every_s!r}: 0 or more seconds are allowed")


def require_count(name: str, value: object) -> None:
    """Raise InvalidArgument unless something can be done so many times."""
    if not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{name} is {value!r}: a whole number is allowed, at least 1")


def to_utc(name: str, value: datetime | None) -> datetime | None:
    """Return a bound of times as one of UTC; without a zone it is local, as Python has it."""
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise InvalidArgument(
            f"{name} is {value!r}: a datetime is allowed, without a zone it is local time"
        )
    return value.astimezone(UTC)


def require_window(spark: SparkSession, window: str) -> None:
    """Raise InvalidArgument unless Spark knows the length of a window; nothing runs for it."""
    try:
        spark.range(0).select(F.window(F.timestamp_millis("id"), window))
    except PySparkException as error:
        raise InvalidArgument(
            f"window is {window!r}: a length such as '30 seconds', '5 minutes' or '1 day' is "
            "allowed, months and years are not"
        ) from error
