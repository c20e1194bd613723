"""Preconditions of several pipelines, checked first so that mistakes are reported immediately."""

from __future__ import annotations

import threading
from numbers import Real

from pyspark.sql import SparkSession

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


def require_interval(every_s: float) -> None:
    """Raise InvalidArgument unless the interval and the number of waits are possible."""
    if not (isinstance(every_s, Real) and 0 <= every_s <= threading.TIMEOUT_MAX):
        raise InvalidArgument(f"every_s must be 0 or more seconds, got {every_s!r}")


def require_count(name: str, value: object) -> None:
    """Raise InvalidArgument unless it is a valid number of repetitions."""
    if not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{name} must be a whole number, 1 or more, got {value!r}")
