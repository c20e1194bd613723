# Units of consume queues, compared with the records they point to.

from turbopump.core.reference.units import TakenUnits, UnitLimits


cdef struct _Expected:
    # What a record must have to be the message of a unit.
    const uint8_t* topic
    Py_ssize_t topic_bytes
    int64_t queue_id
    int64_t queue_offset
    bint any_offset


cdef int64_t _properties_at(
    const uint8_t* p, int64_t size, int64_t position, _Expected* expected
) noexcept nogil:
    """Return where a record's properties begin in it; -1 if it is not the message of a unit.

    Its bytes are known to lie within the buffer.
    """
    if size < _FIXED_BYTES:
        return -1
    cdef int64_t fixed = _fixed_bytes(p)
    if size < fixed or _be_i32(p) != size or _be_u32(p + 4) != _MAGIC:
        return -1
    if _be_i32(p + 12) != expected.queue_id or _be_i64(p + 28) != position:
        return -1
    if not expected.any_offset and _be_i64(p + 20) != expected.queue_offset:
        return -1
    cdef int64_t body_bytes = _be_i32(p + fixed - 4)
    cdef int64_t topic_end = fixed + body_bytes + expected.topic_bytes
    cdef int64_t left = size - topic_end - 2
    if body_bytes < 0 or left < 0:
        return -1
    if memcmp(p + topic_end - expected.topic_bytes, expected.topic, expected.topic_bytes) != 0:
        return -1
    return topic_end + 2 if _be_i16(p + topic_end) == left else -1


cdef inline bint _is_inside(int64_t at, int64_t size, Py_ssize_t length) noexcept nogil:
    return 0 <= at <= length and 0 <= size <= length - at


cdef inline int64_t _at(int64_t position, int64_t base) noexcept nogil:
    """Return a position's place in a buffer; negative if it is before it or cannot be anywhere."""
    return position - base if position >= base >= 0 else -1


def take_units(
    bytes units not None, Py_ssize_t first, view, int64_t base, bytes stored_topic not None,
    int64_t queue_id, int64_t queue_offset, limits, *, bint is_shifted=False, codes=None, bytes mask=None,
    accepts=None, int64_t accept_cost=0, int64_t cost_max=0, int64_t taken=0,
    int64_t taken_bytes=0,
):
    """Take the wanted messages of a queue's units, from one on, until an answer is full."""
    cdef _Bytes held = _Bytes.__new__(_Bytes, view)
    cdef int64_t recent_from, recent_bytes, recent_count, old_bytes, old_count
    recent_from, recent_bytes, recent_count, old_bytes, old_count = limits
    cdef set wanted = None if codes is None else {each & 0xFFFF_FFFF for each in codes}
    cdef bint is_only = wanted is not None and len(wanted) == 1
    cdef uint32_t only = next(iter(wanted)) if is_only else 0
    cdef _Expected expected
    expected.topic = <const uint8_t*>PyBytes_AS_STRING(stored_topic)
    expected.topic_bytes = PyBytes_GET_SIZE(stored_topic)
    expected.queue_id = queue_id
    expected.any_offset = is_shifted
    cdef list offsets = [], sizes = [], pieces = []
    cdef const uint8_t* unit
    cdef int64_t position, size, at, text_at, begin = 0, end = 0, cost = 0
    cdef Py_ssize_t number = first, count = PyBytes_GET_SIZE(units) // _UNIT_BYTES
    cdef uint32_t code
    cdef bint is_mismatch = False
    if first < 0 or (mask is not None and PyBytes_GET_SIZE(mask) < count):
        raise IndexError("index out of range")
    while number < count:
        unit = <const uint8_t*>PyBytes_AS_STRING(units) + number * _UNIT_BYTES
        position = _be_i64(unit)
        size = _be_i32(unit + 8)
        if taken:
            if position >= recent_from:
                if taken >= recent_count or taken_bytes + size > recent_bytes:
                    break
            elif taken >= old_count or taken_bytes + size > old_bytes:
                break
        code = _be_u32(unit + 16)
        if (
            (wanted is None or (code == only if is_only else code in wanted))
            and (mask is None or PyBytes_AS_STRING(mask)[number])
        ):
            at = _at(position, base)
            text_at = -1
            if _is_inside(at, size, held.size):
                expected.queue_offset = queue_offset + number
                text_at = _properties_at(held.start + at, size, position, &expected)
            if text_at < 0:
                is_mismatch = True
                break
            is_wanted = True
            if accepts is not None:
                text = PyBytes_FromStringAndSize(
                    <const char*>held.start + at + text_at, size - text_at
                )
                cost += accept_cost + size - text_at
                is_wanted = accepts(text)
            if is_wanted:
                if at != end or not offsets:
                    if offsets:
                        pieces.append(view[begin:end])
                    begin = at
                end = at + size
                offsets.append(queue_offset + number)
                sizes.append(size)
                taken += 1
                taken_bytes += size
        number += 1
        if accepts is not None and cost >= cost_max:
            break
    if offsets:
        pieces.append(view[begin:end])
    return TakenUnits(number, is_mismatch, offsets, sizes, pieces, cost)


def unit_times(
    bytes units not None, view, int64_t base, bytes stored_topic not None, queue_ids, queue_offsets
):
    """Return the store timestamps of messages of a topic; -1 for those the buffer does not have."""
    cdef _Bytes held = _Bytes.__new__(_Bytes, view)
    cdef Py_ssize_t number, count = PyBytes_GET_SIZE(units) // _UNIT_BYTES
    cdef array.array found = array.clone(_LONGS, count, False)
    cdef _Expected expected
    cdef const uint8_t* unit
    cdef int64_t position, size, at
    if len(queue_ids) != count or len(queue_offsets) != count:
        raise ValueError("zip() arguments differ in length")
    expected.topic = <const uint8_t*>PyBytes_AS_STRING(stored_topic)
    expected.topic_bytes = PyBytes_GET_SIZE(stored_topic)
    expected.any_offset = False
    for number in range(count):
        unit = <const uint8_t*>PyBytes_AS_STRING(units) + number * _UNIT_BYTES
        position = _be_i64(unit)
        size = _be_i32(unit + 8)
        expected.queue_id = queue_ids[number]
        expected.queue_offset = queue_offsets[number]
        at = _at(position, base)
        found.data.as_longlongs[number] = -1
        if _is_inside(at, size, held.size) and (
            _properties_at(held.start + at, size, position, &expected) >= 0
        ):
            found.data.as_longlongs[number] = _be_i64(held.start + at + _time_at(held.start + at))
    return found
