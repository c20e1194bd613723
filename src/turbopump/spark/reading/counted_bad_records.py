"""Bad records as rows, for queries that count them before dropping them.

Spark's Python sources have no metrics of their own, so what a source drops cannot be counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from turbopump.spark.reading.options import columns_of, on_bad_record_of
from turbopump.spark.records.bad_records import OnBadRecord
from turbopump.spark.records.schema import DECODE_ERROR

_REPLACED = ("columns", "includeproperties", "onbadrecord")


def counted_options(options: Mapping[str, str]) -> tuple[dict[str, str], bool]:
    """Return options with which bad records are rows, and whether the query drops them."""
    mode = on_bad_record_of(options)
    if mode is OnBadRecord.FAIL:
        return dict(options), False
    columns = dict.fromkeys([*columns_of(options), DECODE_ERROR])
    kept = {name: text for name, text in options.items() if name.lower() not in _REPLACED}
    as_rows = OnBadRecord.NULL if mode is OnBadRecord.SKIP else mode
    is_dropped = mode is not OnBadRecord.NULL
    return {**kept, "columns": ",".join(columns), "onBadRecord": as_rows.value}, is_dropped
