"""Counts that a query makes of its rows, as reported in Spark's progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress

METRICS = "turbopump"
"""The name in Spark's progress for the counts of a consumer or a counted stream."""
BAD = "bad"
"""The count of records that could not be decoded, however ``onBadRecord`` handles them."""


def observed(progress: StreamingQueryProgress) -> Mapping[str, Any] | None:
    """Return the counts of a batch by name, or None if its query has none."""
    row = progress.observedMetrics.get(METRICS)
    if row is None:
        return None
    found = row.asDict()
    if "values" in found:
        # As JSON produced elsewhere has it, with names separate from values.
        names = [field["name"] for field in found["schema"]["fields"]]
        found = dict(zip(names, found["values"], strict=True))
    return found
