"""Counts that a query makes of its rows, as Spark's progress has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress

METRICS = "turbopump"
"""What Spark's progress calls the counts of a consumer or a counted stream."""
BAD = "bad"
"""The count of records that could not be decoded, whatever ``onBadRecord`` makes of them."""


def observed(progress: StreamingQueryProgress) -> Mapping[str, Any] | None:
    """Return the counts of a batch by name, None if its query has none."""
    row = progress.observedMetrics.get(METRICS)
    if row is None:
        return None
    found = row.asDict()
    if "values" in found:
        # As JSON that was made elsewhere has it, names apart from values.
        names = [field["name"] for field in found["schema"]["fields"]]
        found = dict(zip(names, found["values"], strict=True))
    return found
