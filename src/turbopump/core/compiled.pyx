# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=False
"""The core in Cython; equals `turbopump.core.reference`."""

include "_hashing.pxi"
include "_records.pxi"
include "_frames.pxi"
include "_frame_writers.pxi"
include "_block.pxi"
include "_units.pxi"
include "_index_entries.pxi"
include "_columns.pxi"
include "_rows.pxi"

CORE_NAME = "compiled"
