# Entries of the key index: each is linked to an older one of the same hash slot.

from cpython.buffer cimport PyBUF_WRITABLE

cdef enum:
    _ENTRY_BYTES = 20


cdef class _Writable:
    """A buffer that can be written to, held as long as this exists."""

    cdef Py_buffer buffer
    cdef uint8_t* start
    cdef Py_ssize_t size

    def __cinit__(self, data):
        PyObject_GetBuffer(data, &self.buffer, PyBUF_WRITABLE)
        self.start = <uint8_t*>self.buffer.buf
        self.size = self.buffer.len

    def __dealloc__(self):
        PyBuffer_Release(&self.buffer)


def whole_entries(entries, int64_t log_end, *, bint has_position_0):
    """Count the entries before the first that was not completely written, or is not of this log."""
    cdef _Bytes held = _Bytes.__new__(_Bytes, entries)
    cdef Py_ssize_t number, count = held.size // _ENTRY_BYTES
    cdef const uint8_t* entry = held.start
    cdef int64_t position, before = -1
    for number in range(count):
        position = _be_i64(entry + 4)
        if position < before or position >= log_end or (position <= 0 and not has_position_0):
            return number
        if _be_i32(entry) < 0 or _be_i32(entry + 12) < 0:
            return number
        before = position
        entry += _ENTRY_BYTES
    return count


cdef inline int64_t _slot_of(const uint8_t* entry, int64_t slot_count) noexcept nogil:
    cdef int64_t slot = _be_i32(entry) % slot_count
    return slot + slot_count if slot < 0 else slot


def chain_entries(entries, slots, int64_t first):
    """Link new entries into their slots; return how many of these were empty."""
    cdef _Writable held = _Writable.__new__(_Writable, entries)
    cdef _Writable table = _Writable.__new__(_Writable, slots)
    cdef int64_t slot_count = table.size // 4
    cdef Py_ssize_t number, count = held.size // _ENTRY_BYTES, empty = 0
    cdef uint8_t* entry = held.start
    cdef uint8_t* newest
    cdef int64_t slot, previous
    if count and not slot_count:
        raise ZeroDivisionError("integer division or modulo by zero")
    for number in range(count):
        slot = _slot_of(entry, slot_count)
        newest = table.start + slot * 4
        previous = _be_i32(newest)
        if previous >= first and (
            first < 0
            or previous >= first + number
            or _slot_of(held.start + (previous - first) * _ENTRY_BYTES, slot_count) != slot
        ):
            previous = 0
        if previous <= 0:
            previous = 0
            empty += 1
        _put_u32(entry + 16, <uint32_t>previous)
        _put_u32(newest, <uint32_t>(first + number))
        entry += _ENTRY_BYTES
    return empty
