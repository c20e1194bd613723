# Stored records: found in a buffer and read, one by one or many together.

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy

import array as _array
from collections.abc import Sequence as _Sequence

from turbopump.errors import RecordError

cdef enum:
    _FIXED_BYTES = 91
    _V6_MORE_BYTES = 12
    _INVISIBLE = 4
    _ROLLBACK = 12
    _UNIT_BYTES = 20
    _TOPIC_BYTES_MAX = 127
    _TEXT_BYTES_MAX = 32767

cdef uint32_t _MAGIC = 0xDAA320A7
cdef uint32_t _MAGIC_V2 = 0xDAA320AB
cdef array.array _INTS = _array.array("i")
cdef array.array _LONGS = _array.array("q")


cdef inline uint32_t _be_u32(const uint8_t* p) noexcept nogil:
    return <uint32_t>p[0] << 24 | <uint32_t>p[1] << 16 | <uint32_t>p[2] << 8 | p[3]


cdef inline int32_t _be_i32(const uint8_t* p) noexcept nogil:
    return <int32_t>_be_u32(p)


cdef inline int16_t _be_i16(const uint8_t* p) noexcept nogil:
    return <int16_t>(<uint16_t>p[0] << 8 | p[1])


cdef inline int64_t _be_i64(const uint8_t* p) noexcept nogil:
    return <int64_t>(<uint64_t>_be_u32(p) << 32 | _be_u32(p + 4))


cdef inline void _put_u32(uint8_t* p, uint32_t value) noexcept nogil:
    p[0] = value >> 24
    p[1] = value >> 16 & 0xFF
    p[2] = value >> 8 & 0xFF
    p[3] = value & 0xFF


cdef inline void _put_i64(uint8_t* p, int64_t value) noexcept nogil:
    _put_u32(p, <uint32_t>(<uint64_t>value >> 32))
    _put_u32(p + 4, <uint32_t>value)


cdef inline Py_ssize_t _fixed_bytes(const uint8_t* p) noexcept nogil:
    """Return the size of a record's fixed part, without the length of its topic and properties."""
    cdef uint8_t bits = p[39]
    return _FIXED_BYTES - 3 + (_V6_MORE_BYTES if bits & 0x10 else 0) + (
        _V6_MORE_BYTES if bits & 0x20 else 0
    )


cdef inline Py_ssize_t _time_at(const uint8_t* p) noexcept nogil:
    return 68 if p[39] & 0x10 else 56


cdef class _Bytes:
    """A buffer that is held as long as anything refers to it."""

    cdef Py_buffer buffer
    cdef const uint8_t* start
    cdef Py_ssize_t size

    def __cinit__(self, data):
        PyObject_GetBuffer(data, &self.buffer, PyBUF_SIMPLE)
        self.start = <const uint8_t*>self.buffer.buf
        self.size = self.buffer.len

    def __dealloc__(self):
        PyBuffer_Release(&self.buffer)


# --- single records -------------------------------------------------------------------------------


cdef class StoredRecord:
    """A stored record with all its fields, in the record's own order up to the body's length."""

    cdef readonly int64_t size
    cdef readonly uint32_t magic
    cdef readonly int64_t body_crc
    cdef readonly int64_t queue_id
    cdef readonly int64_t flag
    cdef readonly int64_t queue_offset
    cdef readonly int64_t physical_offset
    cdef readonly int64_t sys_flag
    cdef readonly int64_t born_timestamp_ms
    cdef readonly bytes born_ip
    cdef readonly int64_t born_port
    cdef readonly int64_t store_timestamp_ms
    cdef readonly bytes store_ip
    cdef readonly int64_t store_port
    cdef readonly int64_t reconsume_times
    cdef readonly int64_t prepared_transaction_offset
    cdef readonly int64_t body_length
    cdef readonly bytes stored_body
    cdef readonly str topic
    cdef readonly bytes stored_properties
    cdef public object _properties
    cdef public object _body

    def __init__(
        self, size, magic, body_crc, queue_id, flag, queue_offset, physical_offset, sys_flag,
        born_timestamp_ms, born_ip, born_port, store_timestamp_ms, store_ip, store_port,
        reconsume_times, prepared_transaction_offset, body_length, stored_body, topic,
        stored_properties, _properties=None, _body=None,
    ):
        self.size = size
        self.magic = magic
        self.body_crc = body_crc
        self.queue_id = queue_id
        self.flag = flag
        self.queue_offset = queue_offset
        self.physical_offset = physical_offset
        self.sys_flag = sys_flag
        self.born_timestamp_ms = born_timestamp_ms
        self.born_ip = born_ip
        self.born_port = born_port
        self.store_timestamp_ms = store_timestamp_ms
        self.store_ip = store_ip
        self.store_port = store_port
        self.reconsume_times = reconsume_times
        self.prepared_transaction_offset = prepared_transaction_offset
        self.body_length = body_length
        self.stored_body = stored_body
        self.topic = topic
        self.stored_properties = stored_properties
        self._properties = _properties
        self._body = _body

    def _fields(self):
        return (
            self.size, self.magic, self.body_crc, self.queue_id, self.flag, self.queue_offset,
            self.physical_offset, self.sys_flag, self.born_timestamp_ms, self.born_ip,
            self.born_port, self.store_timestamp_ms, self.store_ip, self.store_port,
            self.reconsume_times, self.prepared_transaction_offset, self.body_length,
            self.stored_body, self.topic, self.stored_properties,
        )

    def __reduce__(self):
        return type(self), (*self._fields(), self._properties, self._body)


cdef str _topic_text(const uint8_t* p, Py_ssize_t size, int64_t at):
    try:
        return PyUnicode_DecodeUTF8(<const char*>p, size, NULL)
    except UnicodeDecodeError as error:
        raise RecordError("topic is not UTF-8", at) from error


cdef StoredRecord _read(
    const uint8_t* data, Py_ssize_t length, Py_ssize_t at, bint check_crc, type kind,
    StoredRecord like,
):
    """Read the record at a place; its topic is that of ``like`` if it is the same."""
    cdef Py_ssize_t left = length - at if at >= 0 else 0
    cdef const uint8_t* p = data + at if left > 0 else NULL
    cdef Py_ssize_t fixed = _fixed_bytes(p) if left >= _FIXED_BYTES else 0
    # The fixed part of the shortest record is shorter than any record by three bytes.
    if not fixed or left < fixed:
        raise RecordError(f"{max(0, left)} bytes are too few for a record", at)
    cdef int64_t size = _be_i32(p)
    cdef uint32_t magic = _be_u32(p + 4)
    cdef int64_t body_length = _be_i32(p + fixed - 4)
    cdef int64_t body_at = at + fixed
    cdef int64_t end = at + size
    cdef int64_t body_end = body_at + body_length
    cdef int64_t topic_at, topic_end, text_at, topic_length
    if magic != _MAGIC and magic != _MAGIC_V2:
        raise RecordError(f"magic number 0x{magic:08X} is not a message's", at + 4)
    if size > left:
        raise RecordError(f"record of {size} bytes, but {left} are left", at)
    if body_length < 0 or body_end >= end:
        raise RecordError(f"body of {body_length} bytes in a record of {size}", body_at - 4)
    if magic == _MAGIC:
        topic_at = body_end + 1
        topic_end = topic_at + data[body_end]
    else:
        if end - body_end < 2:
            raise RecordError("record ends before its topic", body_end)
        topic_length = _be_i16(data + body_end)
        if topic_length < 0:
            raise RecordError(
                f"topic of {topic_length} bytes does not fit into its record", body_end
            )
        topic_at = body_end + 2
        topic_end = topic_at + topic_length
    text_at = topic_end + 2
    if text_at > end:
        raise RecordError(
            f"topic of {topic_end - topic_at} bytes does not fit into its record", body_end
        )
    cdef Py_ssize_t text_length = _be_i16(data + topic_end)
    cdef StoredRecord record = kind.__new__(kind)
    if record is None:
        raise TypeError(f"records cannot be of type {kind.__name__}")
    cdef Py_ssize_t topic_size = topic_end - topic_at
    record.topic = _topic_text(data + topic_at, topic_size, topic_at) if (
        like is None or not _is_topic(like.topic, data + topic_at, topic_size)
    ) else like.topic
    record.body_crc = _be_i32(p + 8)
    if check_crc and <int64_t>c_body_crc(data + body_at, body_length) != record.body_crc:
        raise RecordError(f"body does not match its checksum {record.body_crc}", body_at)
    if text_length != end - text_at:
        raise RecordError(
            f"properties of {text_length} bytes do not end with their record", topic_end
        )
    record.size = size
    record.magic = magic
    record.queue_id = _be_i32(p + 12)
    record.flag = _be_i32(p + 16)
    record.queue_offset = _be_i64(p + 20)
    record.physical_offset = _be_i64(p + 28)
    record.sys_flag = _be_i32(p + 36)
    record.born_timestamp_ms = _be_i64(p + 40)
    cdef const uint8_t* q = p + 48
    cdef Py_ssize_t ip_bytes = 16 if p[39] & 0x10 else 4
    record.born_ip = _same_or_new(None if like is None else like.born_ip, q, ip_bytes)
    record.born_port = _be_i32(q + ip_bytes)
    q += ip_bytes + 4
    record.store_timestamp_ms = _be_i64(q)
    q += 8
    ip_bytes = 16 if p[39] & 0x20 else 4
    record.store_ip = _same_or_new(None if like is None else like.store_ip, q, ip_bytes)
    record.store_port = _be_i32(q + ip_bytes)
    q += ip_bytes + 4
    record.reconsume_times = _be_i32(q)
    record.prepared_transaction_offset = _be_i64(q + 4)
    record.body_length = body_length
    record.stored_body = PyBytes_FromStringAndSize(<const char*>data + body_at, body_length)
    record.stored_properties = PyBytes_FromStringAndSize(<const char*>data + text_at, text_length)
    return record


cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL


cdef bint _is_topic(str topic, const uint8_t* p, Py_ssize_t size) except -1:
    cdef Py_ssize_t own_size
    cdef const char* own = PyUnicode_AsUTF8AndSize(topic, &own_size)
    return own_size == size and memcmp(own, p, size) == 0


cdef bytes _same_or_new(bytes known, const uint8_t* p, Py_ssize_t size):
    if known is not None and PyBytes_GET_SIZE(known) == size:
        if memcmp(PyBytes_AS_STRING(known), p, size) == 0:
            return known
    return PyBytes_FromStringAndSize(<const char*>p, size)


def read_record(data, Py_ssize_t at=0, *, bint check_crc=False, type kind=StoredRecord):
    """Read the record at a position; ``check_crc`` also verifies the body's checksum."""
    cdef _Bytes held = _Bytes.__new__(_Bytes, data)
    return _read(held.start, held.size, at, check_crc, kind, None)


def read_records(data, *, bint check_crc=False, type kind=StoredRecord):
    """Read records up to the end, as in the response to a pull, or up to the first damaged one."""
    cdef _Bytes held = _Bytes.__new__(_Bytes, data)
    cdef Py_ssize_t at = 0
    cdef list found = []
    cdef StoredRecord record = None
    try:
        while at < held.size:
            record = _read(held.start, held.size, at, check_crc, kind, record)
            found.append(record)
            at += record.size
    except RecordError as error:
        return found, error
    return found, None


cdef class RecordEntry:
    """What queues and indexes need of a stored record; its body is not copied."""

    cdef readonly int64_t size
    cdef readonly int64_t queue_id
    cdef readonly int64_t queue_offset
    cdef readonly int64_t physical_offset
    cdef readonly int64_t sys_flag
    cdef readonly int64_t store_timestamp_ms
    cdef readonly bytes topic
    cdef readonly bytes properties

    def __init__(
        self, size, queue_id, queue_offset, physical_offset, sys_flag, store_timestamp_ms, topic,
        properties,
    ):
        self.size = size
        self.queue_id = queue_id
        self.queue_offset = queue_offset
        self.physical_offset = physical_offset
        self.sys_flag = sys_flag
        self.store_timestamp_ms = store_timestamp_ms
        self.topic = topic
        self.properties = properties


# --- many records ---------------------------------------------------------------------------------


cdef struct _Row:
    int64_t at
    int64_t physical_offset
    int64_t queue_offset
    int64_t store_timestamp_ms
    int32_t size
    int32_t topic_at  # This and the next counted from the start of the record.
    int32_t text_at
    int32_t queue_id
    int32_t sys_flag
    int32_t topic  # Number of its topic.


cdef bint _row_at(
    const uint8_t* data, Py_ssize_t at, Py_ssize_t end, bint check_crc, _Row* row
) noexcept:
    """Read the record at a place if it is intact and ends by ``end``."""
    if at < 0 or end - at < _FIXED_BYTES:
        return False
    cdef Py_ssize_t left = end - at
    cdef const uint8_t* p = data + at
    cdef Py_ssize_t fixed = _fixed_bytes(p)
    if left < fixed:
        return False
    cdef int64_t size = _be_i32(p)
    cdef int64_t body_length = _be_i32(p + fixed - 4)
    cdef int64_t topic_at = fixed + body_length + 1
    if _be_u32(p + 4) != _MAGIC or body_length < 0 or size > left or topic_at >= size:
        return False
    cdef int64_t text_at = topic_at + p[topic_at - 1] + 2
    if text_at > size or text_at + _be_i16(p + text_at - 2) != size:
        return False
    if check_crc and c_body_crc(p + fixed, body_length) != _be_u32(p + 8):
        return False
    row.at = at
    row.size = size
    row.topic_at = topic_at
    row.text_at = text_at
    row.queue_id = _be_i32(p + 12)
    row.queue_offset = _be_i64(p + 20)
    row.physical_offset = _be_i64(p + 28)
    row.sys_flag = _be_i32(p + 36)
    row.store_timestamp_ms = _be_i64(p + _time_at(p))
    return True


cdef inline bint _ends_by(const _Row* row, int64_t end) noexcept nogil:
    """Whether a record ends at a position or before it; no sum exceeds 64 bits."""
    if end >= 0:
        return row.physical_offset <= end - row.size
    return row.physical_offset < 0 and row.physical_offset + row.size <= end


cdef bint _is_topic_name(const uint8_t* p, Py_ssize_t size) noexcept:
    cdef Py_ssize_t number
    cdef uint8_t all_bits = 0
    if size == 0 or (p[0] == c"." and (size == 1 or (size == 2 and p[1] == c"."))):
        return False
    for number in range(size):
        if p[number] == 0 or p[number] == c"/":
            return False
        all_bits |= p[number]
    if all_bits < 0x80:
        return True
    return c_is_utf8(p, size)


def is_topic_name(topic):
    """Whether a topic can name a directory; a damaged or hostile one must not lead elsewhere."""
    cdef _Bytes held = _Bytes.__new__(_Bytes, topic)
    return _is_topic_name(held.start, held.size)


def read_entry(data, Py_ssize_t at=0, *, bint check_crc=False):
    """Read what a log's reader needs of the record at a position; None if there is none."""
    cdef _Bytes held = _Bytes.__new__(_Bytes, data)
    cdef _Row row
    if not _row_at(held.start, at, held.size, check_crc, &row):
        return None
    return _entry(held.start, &row, None)


cdef RecordEntry _entry(const uint8_t* data, _Row* row, bytes topic):
    cdef RecordEntry entry = RecordEntry.__new__(RecordEntry)
    cdef const char* p = <const char*>data + row.at
    entry.size = row.size
    entry.queue_id = row.queue_id
    entry.queue_offset = row.queue_offset
    entry.physical_offset = row.physical_offset
    entry.sys_flag = row.sys_flag
    entry.store_timestamp_ms = row.store_timestamp_ms
    entry.topic = topic if topic is not None else PyBytes_FromStringAndSize(
        p + row.topic_at, row.text_at - 2 - row.topic_at
    )
    entry.properties = PyBytes_FromStringAndSize(p + row.text_at, row.size - row.text_at)
    return entry


cdef class _Rows:
    """Rows of records, which several `Records` share."""

    cdef _Row* start
    cdef Py_ssize_t count
    cdef Py_ssize_t capacity

    def __dealloc__(self):
        free(self.start)

    cdef _Row* next(self) except NULL:
        """Return a place for one more row; it counts once ``count`` is raised."""
        cdef Py_ssize_t capacity
        cdef void* grown
        if self.count == self.capacity:
            capacity = max(8, 2 * self.capacity)
            grown = realloc(self.start, capacity * sizeof(_Row))
            if grown == NULL:
                raise MemoryError()
            self.start = <_Row*>grown
            self.capacity = capacity
        return self.start + self.count


def find_records(
    data, Py_ssize_t at, Py_ssize_t end, base, *, bint check_crc=False, bint stop_at_zero=False,
    Py_ssize_t count_max=2**31 - 1,
):
    """Find intact records that follow each other in a part of a buffer, up to ``count_max``."""
    cdef _Bytes held = _Bytes.__new__(_Bytes, data)
    cdef _Rows rows = _Rows.__new__(_Rows)
    cdef list topics = []
    cdef dict numbers = None
    cdef int64_t first = -1 if base is None else base
    cdef bint is_anywhere = base is None
    cdef _Row* row
    cdef _Row* before = NULL
    cdef const uint8_t* p
    cdef Py_ssize_t topic_bytes
    end = min(end, held.size)
    while at < end and rows.count < count_max:
        row = rows.next()
        if not _row_at(held.start, at, end, check_crc, row) or row.queue_id < 0:
            break
        if not is_anywhere and <uint64_t>row.physical_offset != <uint64_t>first + <uint64_t>at:
            break
        p = held.start + at
        topic_bytes = row.text_at - 2 - row.topic_at
        # Another row may have moved the rows.
        before = row - 1 if rows.count else NULL
        if before != NULL and (
            before.text_at - 2 - before.topic_at == topic_bytes
            and memcmp(held.start + before.at + before.topic_at, p + row.topic_at, topic_bytes) == 0
        ):
            row.topic = before.topic
        else:
            if not _is_topic_name(p + row.topic_at, topic_bytes):
                break
            topic = PyBytes_FromStringAndSize(<const char*>p + row.topic_at, topic_bytes)
            if numbers is None:
                numbers = {}
            number = numbers.get(topic)
            if number is None:
                numbers[topic] = number = len(topics)
                topics.append(topic)
            row.topic = number
        if stop_at_zero and memchr(p + row.text_at, 0, row.size - row.text_at) != NULL:
            break
        rows.count += 1
        at += row.size
    return _records(held, rows, rows.start, rows.count, topics)


cdef Records _records(
    _Bytes held, _Rows rows, _Row* start, Py_ssize_t count, list topics
):
    cdef Records records = Records.__new__(Records)
    records.held = held
    records.rows = rows
    records.start = start
    records.count = count
    records.topics = topics
    return records


cdef class Records:
    """Records in a buffer, in ascending order: all of a part of a log, or those of one queue."""

    cdef _Bytes held
    cdef _Rows rows
    cdef _Row* start
    cdef Py_ssize_t count
    cdef list topics

    def __init__(self):
        raise TypeError("Records are found by find_records")

    def __len__(self):
        return self.count

    def __getitem__(self, which):
        cdef Py_ssize_t first, end, step
        if isinstance(which, slice):
            first, end, step = which.indices(self.count)
            if step != 1:
                raise ValueError("Records have slices of step 1 only")
            return _records(
                self.held, self.rows, self.start + first, max(0, end - first), self.topics
            )
        return self._entry_of(self._row(which))

    def __iter__(self):
        cdef Py_ssize_t number
        for number in range(self.count):
            yield self._entry_of(self.start + number)

    cdef _Row* _row(self, number) except NULL:
        cdef Py_ssize_t place = number
        if place < 0:
            place += self.count
        if not 0 <= place < self.count:
            raise IndexError("list index out of range")
        return self.start + place

    cdef RecordEntry _entry_of(self, _Row* row):
        return _entry(self.held.start, row, <bytes>self.topics[row.topic])

    @property
    def physical_offset(self):
        """Position of the first record."""
        return self._row(0).physical_offset

    @property
    def end(self):
        """Position after the last record."""
        cdef _Row* last = self._row(-1)
        # A Python number: what a peer sends may be the highest position there is.
        return <object>last.physical_offset + last.size

    @property
    def end_at(self):
        """Place in the buffer after the last record."""
        cdef _Row* last = self._row(-1)
        return last.at + last.size

    @property
    def store_timestamp_ms(self):
        """Store timestamp of the last record."""
        return self._row(-1).store_timestamp_ms

    @property
    def newest_ms(self):
        """The latest store timestamp; the last record's, unless the clock was set back."""
        cdef int64_t newest = self._row(0).store_timestamp_ms
        cdef Py_ssize_t number
        for number in range(1, self.count):
            newest = max(newest, self.start[number].store_timestamp_ms)
        return newest

    def positions(self):
        cdef array.array found = array.clone(_LONGS, self.count, False)
        cdef Py_ssize_t number
        for number in range(self.count):
            found.data.as_longlongs[number] = self.start[number].physical_offset
        return found

    def sizes(self):
        cdef array.array found = array.clone(_LONGS, self.count, False)
        cdef Py_ssize_t number
        for number in range(self.count):
            found.data.as_longlongs[number] = self.start[number].size
        return found

    def queue_offsets(self):
        cdef array.array found = array.clone(_LONGS, self.count, False)
        cdef Py_ssize_t number
        for number in range(self.count):
            found.data.as_longlongs[number] = self.start[number].queue_offset
        return found

    def store_timestamps_ms(self):
        cdef array.array found = array.clone(_LONGS, self.count, False)
        cdef Py_ssize_t number
        for number in range(self.count):
            found.data.as_longlongs[number] = self.start[number].store_timestamp_ms
        return found

    def tags_codes(self):
        """Return the hash of each record's tag; 0 if it has none."""
        cdef array.array found = array.clone(_LONGS, self.count, False)
        cdef Py_ssize_t number
        for number in range(self.count):
            found.data.as_longlongs[number] = _tags_code(self.held.start, self.start + number)
        return found

    def properties(self, number):
        """Return the properties of one record, in their text form."""
        cdef _Row* row = self._row(number)
        return PyBytes_FromStringAndSize(
            <const char*>self.held.start + row.at + row.text_at, row.size - row.text_at
        )

    def count_before(self, int64_t end):
        """Return how many records end at a position or before it."""
        cdef Py_ssize_t low = 0, high = self.count, middle
        while low < high:
            middle = (low + high) // 2
            if _ends_by(self.start + middle, end):
                low = middle + 1
            else:
                high = middle
        return low

    def by_queue(self):
        """Return topic, queue id and records of each queue, in order of the first record."""
        cdef Py_ssize_t number, visible = 0, mixed = 0
        cdef _Row* first = NULL
        cdef _Row* row
        for number in range(self.count):
            row = self.start + number
            if row.sys_flag & _INVISIBLE:
                continue
            visible += 1
            if first == NULL:
                first = row
            elif row.topic != first.topic or row.queue_id != first.queue_id:
                mixed += 1
        if visible == 0:
            return []
        if mixed == 0 and visible == self.count:
            return [(self.topics[first.topic], first.queue_id, self)]
        return self._by_mixed_queue(visible)

    cdef list _by_mixed_queue(self, Py_ssize_t visible):
        """Do the same for records of several queues: counts first, then sorts by queue."""
        cdef Py_ssize_t slots = 8, number, slot, queues = 0, queue
        while slots < 2 * visible:
            slots *= 2
        # The first row of a queue, and the number of the queue plus one.
        cdef Py_ssize_t* firsts = <Py_ssize_t*>malloc(slots * sizeof(Py_ssize_t))
        cdef int32_t* table = <int32_t*>calloc(slots, sizeof(int32_t))
        cdef int32_t* of_each = <int32_t*>malloc(self.count * sizeof(int32_t))
        cdef Py_ssize_t* counts = <Py_ssize_t*>calloc(visible + 1, sizeof(Py_ssize_t))
        cdef Py_ssize_t* first_of = <Py_ssize_t*>malloc(visible * sizeof(Py_ssize_t))
        cdef _Rows sorted_rows = _Rows.__new__(_Rows)
        cdef _Row* row
        cdef _Row* other
        cdef uint64_t key
        cdef list found = []
        try:
            sorted_rows.start = <_Row*>malloc(visible * sizeof(_Row))
            if not (firsts and table and of_each and counts and first_of and sorted_rows.start):
                raise MemoryError()
            sorted_rows.count = sorted_rows.capacity = visible
            for number in range(self.count):
                row = self.start + number
                if row.sys_flag & _INVISIBLE:
                    of_each[number] = -1
                    continue
                key = (<uint64_t>row.topic << 32 | <uint32_t>row.queue_id) * 0x9E3779B97F4A7C15ULL
                slot = <Py_ssize_t>(key >> 33) & (slots - 1)
                while table[slot]:
                    other = self.start + firsts[slot]
                    if other.topic == row.topic and other.queue_id == row.queue_id:
                        break
                    slot = (slot + 1) & (slots - 1)
                if not table[slot]:
                    firsts[slot] = number
                    first_of[queues] = number
                    queues += 1
                    table[slot] = <int32_t>queues
                queue = table[slot] - 1
                of_each[number] = <int32_t>queue
                counts[queue + 1] += 1
            for queue in range(queues):
                counts[queue + 1] += counts[queue]
            for queue in range(queues):
                row = self.start + first_of[queue]
                found.append((
                    self.topics[row.topic],
                    row.queue_id,
                    _records(
                        self.held, sorted_rows, sorted_rows.start + counts[queue],
                        counts[queue + 1] - counts[queue], self.topics,
                    ),
                ))
            for number in range(self.count):
                if of_each[number] >= 0:
                    queue = of_each[number]
                    sorted_rows.start[counts[queue]] = self.start[number]
                    counts[queue] += 1
        finally:
            free(firsts)
            free(table)
            free(of_each)
            free(counts)
            free(first_of)
        return found

    def follow(self, int64_t queue_offset):
        """Whether these records of one queue have consecutive offsets, from one on."""
        cdef Py_ssize_t number
        for number in range(self.count):
            if <uint64_t>self.start[number].queue_offset != <uint64_t>queue_offset + <uint64_t>number:
                return False
        return True

    def units(self, codes=None):
        """Return the units of a consume queue; ``codes`` stand there for the hashes of the tags."""
        cdef bytes found = PyBytes_FromStringAndSize(NULL, self.count * _UNIT_BYTES)
        cdef uint8_t* unit = <uint8_t*>PyBytes_AS_STRING(found)
        cdef Py_ssize_t number
        cdef _Row* row
        if codes is not None and len(codes) != self.count:
            raise ValueError(f"{len(codes)} codes for {self.count} records")
        for number in range(self.count):
            row = self.start + number
            _put_i64(unit, row.physical_offset)
            _put_u32(unit + 8, <uint32_t>row.size)
            _put_i64(
                unit + 12, _tags_code(self.held.start, row) if codes is None else codes[number]
            )
            unit += _UNIT_BYTES
        return found

    def keys(self):
        """Return hash, position and store timestamp for each key of each record, for the index."""
        cdef _Keys found = _Keys.__new__(_Keys)
        cdef Py_ssize_t number
        cdef int32_t topic = -1
        cdef uint32_t prefix = 0
        cdef _Row* row
        cdef bytes name
        for number in range(self.count):
            row = self.start + number
            if row.sys_flag & _ROLLBACK == _ROLLBACK:
                continue
            if row.topic != topic:
                topic = row.topic
                name = self.topics[topic]
                prefix = <uint32_t>c_java_hash(
                    <const uint8_t*>PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name), 0
                ) * 31 + c"#"
            found.add(self.held.start, row, prefix)
        return found.arrays()


_Sequence.register(Records)


cdef struct _Place:
    # Of a value within properties; without one, ``size`` is 0.
    const uint8_t* start
    Py_ssize_t size


cdef inline void _note(
    _Place* place, const uint8_t* entry, const uint8_t* mark, const uint8_t* end,
    const char* name, Py_ssize_t name_bytes,
) noexcept nogil:
    """Note the value of an entry if it has a name; the last one that is not empty counts."""
    if mark - entry == name_bytes and end - mark > 1 and memcmp(entry, name, name_bytes) == 0:
        place.start = mark + 1
        place.size = end - mark - 1


cdef inline _Place _value_of(
    const uint8_t* text, Py_ssize_t size, const char* name, Py_ssize_t name_bytes
) noexcept nogil:
    cdef _Place found
    cdef const uint8_t* end = text + size
    cdef const uint8_t* entry = text
    cdef const uint8_t* entry_end
    cdef const uint8_t* mark
    found.start = NULL
    found.size = 0
    while entry < end:
        entry_end = <const uint8_t*>memchr(entry, 2, end - entry)
        if entry_end == NULL:
            entry_end = end
        mark = <const uint8_t*>memchr(entry, 1, entry_end - entry)
        if mark != NULL:
            _note(&found, entry, mark, entry_end, name, name_bytes)
        entry = entry_end + 1
    return found


cdef int64_t _tags_code(const uint8_t* data, _Row* row) noexcept:
    cdef _Place tags = _value_of(data + row.at + row.text_at, row.size - row.text_at, b"TAGS", 4)
    return c_java_hash(tags.start, tags.size, 0) if tags.size else 0


cdef class _Keys:
    """Hashes, positions and store timestamps of keys, as they are found."""

    cdef int32_t* hashes
    cdef int64_t* positions
    cdef int64_t* times_ms
    cdef Py_ssize_t count
    cdef Py_ssize_t capacity

    def __dealloc__(self):
        free(self.hashes)
        free(self.positions)
        free(self.times_ms)

    cdef int add(self, const uint8_t* data, _Row* row, uint32_t prefix) except -1:
        """Add the keys of a record; ``prefix`` is the hash of its topic and the mark after it."""
        cdef const uint8_t* entry = data + row.at + row.text_at
        cdef const uint8_t* end = data + row.at + row.size
        cdef const uint8_t* entry_end
        cdef const uint8_t* mark
        cdef const uint8_t* word
        cdef const uint8_t* word_end
        cdef _Place unique
        cdef _Place given
        unique.size = given.size = 0
        unique.start = given.start = NULL
        while entry < end:
            entry_end = <const uint8_t*>memchr(entry, 2, end - entry)
            if entry_end == NULL:
                entry_end = end
            mark = <const uint8_t*>memchr(entry, 1, entry_end - entry)
            if mark != NULL:
                _note(&unique, entry, mark, entry_end, b"UNIQ_KEY", 8)
                _note(&given, entry, mark, entry_end, b"KEYS", 4)
            entry = entry_end + 1
        if unique.size:
            self.add_one(row, c_java_hash(unique.start, unique.size, prefix))
        word = given.start
        end = given.start + given.size
        while word < end:
            word_end = <const uint8_t*>memchr(word, c" ", end - word)
            if word_end == NULL:
                word_end = end
            if word_end > word:
                self.add_one(row, c_java_hash(word, word_end - word, prefix))
            word = word_end + 1
        return 0

    cdef int add_one(self, _Row* row, int32_t hashed) except -1:
        if self.count == self.capacity:
            self.grow()
        # The one number without a magnitude becomes 0, as in Java.
        self.hashes[self.count] = (0 if hashed == -0x80000000LL else -hashed) if hashed < 0 else hashed
        self.positions[self.count] = row.physical_offset
        self.times_ms[self.count] = row.store_timestamp_ms
        self.count += 1
        return 0

    cdef int grow(self) except -1:
        cdef Py_ssize_t capacity = max(8, 2 * self.capacity)
        cdef void* hashes = realloc(self.hashes, capacity * sizeof(int32_t))
        if hashes != NULL:
            self.hashes = <int32_t*>hashes
        cdef void* positions = realloc(self.positions, capacity * sizeof(int64_t))
        if positions != NULL:
            self.positions = <int64_t*>positions
        cdef void* times_ms = realloc(self.times_ms, capacity * sizeof(int64_t))
        if times_ms != NULL:
            self.times_ms = <int64_t*>times_ms
        if hashes == NULL or positions == NULL or times_ms == NULL:
            raise MemoryError()
        self.capacity = capacity
        return 0

    cdef tuple arrays(self):
        cdef array.array hashes = array.clone(_INTS, self.count, False)
        cdef array.array positions = array.clone(_LONGS, self.count, False)
        cdef array.array times_ms = array.clone(_LONGS, self.count, False)
        if self.count:
            memcpy(hashes.data.as_voidptr, self.hashes, self.count * sizeof(int32_t))
            memcpy(positions.data.as_voidptr, self.positions, self.count * sizeof(int64_t))
            memcpy(times_ms.data.as_voidptr, self.times_ms, self.count * sizeof(int64_t))
        return hashes, positions, times_ms


# --- properties -----------------------------------------------------------------------------------


def property_value(bytes text not None, bytes name not None):
    """Return the value of a property; the last one that is not empty counts."""
    cdef _Place found = _value_of(
        <const uint8_t*>PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text),
        PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name),
    )
    if not found.size:
        return None
    return PyBytes_FromStringAndSize(<const char*>found.start, found.size)


def parse_properties(bytes text not None):
    """Parse the text form; malformed entries are skipped, as every peer does."""
    cdef const char* entry = PyBytes_AS_STRING(text)
    cdef const char* end = entry + PyBytes_GET_SIZE(text)
    cdef const char* entry_end
    cdef const char* mark
    cdef dict found = {}
    while entry < end:
        entry_end = <const char*>memchr(entry, 2, end - entry)
        if entry_end == NULL:
            entry_end = end
        mark = <const char*>memchr(entry, 1, entry_end - entry)
        if mark != NULL and mark > entry and mark + 1 < entry_end:
            name = PyUnicode_DecodeUTF8(entry, mark - entry, b"replace")
            found[name] = PyUnicode_DecodeUTF8(mark + 1, entry_end - mark - 1, b"replace")
        entry = entry_end + 1
    return found


def pop_property(bytes text not None, bytes name not None):
    """Return the text without the first entry of a name and without a final end mark; its value."""
    cdef const uint8_t* start = <const uint8_t*>PyBytes_AS_STRING(text)
    cdef _Popped popped = _popped(
        start, PyBytes_GET_SIZE(text), PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name)
    )
    kept = PyBytes_FromStringAndSize(<const char*>start, popped.before) + (
        PyBytes_FromStringAndSize(<const char*>popped.rest, popped.rest_bytes)
    )
    if popped.value == NULL:
        return kept, None
    return kept, PyBytes_FromStringAndSize(<const char*>popped.value, popped.value_bytes)


cdef struct _Popped:
    # What is left is ``before`` bytes of the text, then the rest.
    Py_ssize_t before
    const uint8_t* rest
    Py_ssize_t rest_bytes
    const uint8_t* value  # NULL if there is none.
    Py_ssize_t value_bytes


cdef _Popped _popped(
    const uint8_t* text, Py_ssize_t size, const char* name, Py_ssize_t name_bytes
) noexcept nogil:
    """Find the first entry of a name; see `pop_property`."""
    cdef _Popped found
    cdef const uint8_t* end = text + size
    cdef const uint8_t* entry = text
    cdef const uint8_t* entry_end
    found.before = size
    found.rest = end
    found.rest_bytes = 0
    found.value = NULL
    found.value_bytes = 0
    while entry < end:
        entry_end = <const uint8_t*>memchr(entry, 2, end - entry)
        if entry_end == NULL:
            entry_end = end
        if entry_end - entry > name_bytes and entry[name_bytes] == 1 and (
            memcmp(entry, name, name_bytes) == 0
        ):
            found.value = entry + name_bytes + 1
            found.value_bytes = entry_end - found.value
            found.before = entry - text
            if entry_end < end:
                found.rest = entry_end + 1
                found.rest_bytes = end - found.rest
            elif found.before:
                # The last entry: the mark before it goes with it.
                found.before -= 1
                return found
            break
        entry = entry_end + 1
    # Without the final end mark.
    if found.rest_bytes:
        if (end - 1)[0] == 2:
            found.rest_bytes -= 1
    elif found.before and text[found.before - 1] == 2:
        found.before -= 1
    return found
