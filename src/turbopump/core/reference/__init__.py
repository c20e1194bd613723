"""The core in plain Python: the definition of what is right."""

from __future__ import annotations

from turbopump.core.reference.block import Block
from turbopump.core.reference.columns import (
    Maps,
    RecordTable,
    Texts,
    Times,
    scan_records,
)
from turbopump.core.reference.frame_writers import (
    VERSION,
    PullRequests,
    PullResponses,
    SendResponses,
    SendTemplate,
)
from turbopump.core.reference.frames import (
    FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    Frame,
    FrameDecoder,
    PullFrame,
    PullResponseFrame,
    SendFrame,
    SendResponseFrame,
    TypedFrame,
    read_response,
)
from turbopump.core.reference.hashing import (
    bloom_positions,
    body_crc,
    index_hash,
    murmur3,
    string_hash,
    tags_code,
)
from turbopump.core.reference.headers import (
    LANGUAGES,
)
from turbopump.core.reference.ids import (
    offset_id,
    offset_ids,
    unique_id,
    unique_id_prefix,
    unique_ids,
)
from turbopump.core.reference.index_entries import chain_entries, whole_entries
from turbopump.core.reference.properties import (
    parse_properties,
    pop_property,
    property_value,
)
from turbopump.core.reference.records import (
    RecordEntry,
    Records,
    StoredRecord,
    find_records,
    is_topic_name,
    read_entry,
    read_record,
    read_records,
)
from turbopump.core.reference.rows import (
    ListColumn,
    RowColumns,
    RowStyle,
    TextColumn,
    encode_rows,
)
from turbopump.core.reference.units import TakenUnits, UnitLimits, take_units, unit_times

CORE_NAME = "plain"

__all__ = [
    "CORE_NAME",
    "FRAME_BYTES_MAX",
    "HEADER_BYTES_MAX",
    "LANGUAGES",
    "VERSION",
    "Block",
    "Frame",
    "FrameDecoder",
    "ListColumn",
    "Maps",
    "PullFrame",
    "PullRequests",
    "PullResponseFrame",
    "PullResponses",
    "RecordEntry",
    "RecordTable",
    "Records",
    "RowColumns",
    "RowStyle",
    "SendFrame",
    "SendResponseFrame",
    "SendResponses",
    "SendTemplate",
    "StoredRecord",
    "TakenUnits",
    "TextColumn",
    "Texts",
    "Times",
    "TypedFrame",
    "UnitLimits",
    "bloom_positions",
    "body_crc",
    "chain_entries",
    "encode_rows",
    "find_records",
    "index_hash",
    "is_topic_name",
    "murmur3",
    "offset_id",
    "offset_ids",
    "parse_properties",
    "pop_property",
    "property_value",
    "read_entry",
    "read_record",
    "read_records",
    "read_response",
    "scan_records",
    "string_hash",
    "tags_code",
    "take_units",
    "unique_id",
    "unique_id_prefix",
    "unique_ids",
    "unit_times",
    "whole_entries",
]
