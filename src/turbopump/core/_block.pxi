# Messages about to be stored together: encoded when added, placed when their position is known.

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_Resize

from turbopump.errors import BodyError, InvalidArgument

cdef enum:
    _BATCH_HEAD_BYTES = 20
    _BATCH_BYTES_MIN = 22


cdef struct _Group:
    Py_ssize_t queue  # Index of its queue in the block; -1 for messages that are in no queue.
    Py_ssize_t first  # Its first record.
    Py_ssize_t count
    Py_ssize_t end
    int64_t queue_offset  # Once it is placed.


cdef struct _Common:
    # What the messages of a group have in common.
    const uint8_t* topic
    Py_ssize_t topic_bytes
    int32_t queue_id
    int32_t sys_flag
    int64_t born_timestamp_ms
    const uint8_t* born_host
    Py_ssize_t born_bytes
    const uint8_t* store_host
    Py_ssize_t store_bytes
    int32_t reconsume_times
    int64_t prepared


cdef int32_t _number32(str name, object value) except? -1:
    if not -(2**31) <= value < 2**31:
        raise InvalidArgument(f"{name} must fit into 32 bits, got {value}")
    return value


cdef int64_t _number64(str name, object value) except? -1:
    if not -(2**63) <= value < 2**63:
        raise InvalidArgument(f"{name} must fit into 64 bits, got {value}")
    return value


cdef int _check_host(bytes host) except -1:
    if PyBytes_GET_SIZE(host) != 8 and PyBytes_GET_SIZE(host) != 20:
        raise InvalidArgument(
            f"a host must have 4 or 16 bytes of IP address and 4 of port, got {len(host)}"
        )
    return 0


cdef class Block:
    """Messages and batches to be stored, in order; each of them is one group."""

    cdef Py_ssize_t record_bytes_max
    cdef Py_ssize_t group_bytes_max
    cdef bytearray data
    cdef uint8_t* start
    cdef Py_ssize_t used
    cdef Py_ssize_t capacity
    cdef _Group* groups
    cdef Py_ssize_t group_count
    cdef Py_ssize_t group_capacity
    cdef int64_t* starts  # Of all records: in the block, and once they are placed in the log.
    cdef Py_ssize_t record_count
    cdef Py_ssize_t record_capacity
    cdef Py_ssize_t placed
    cdef list queue_list
    cdef dict queue_numbers
    cdef bytes last_topic
    cdef int64_t last_queue_id
    cdef Py_ssize_t last_number

    def __cinit__(self, Py_ssize_t record_bytes_max, Py_ssize_t group_bytes_max):
        self.record_bytes_max = record_bytes_max
        self.group_bytes_max = group_bytes_max
        self.data = bytearray()
        self.queue_list = []

    def __dealloc__(self):
        free(self.groups)
        free(self.starts)

    def __len__(self):
        """Return the number of groups."""
        return self.group_count

    @property
    def size(self):
        """Bytes of all records."""
        return self.used

    @property
    def queues(self):
        """Topic and id of each queue with messages in the block."""
        return list(self.queue_list)

    # --- adding -----------------------------------------------------------------------------------

    def add(
        self, bytes topic not None, queue_id, body, bytes properties not None, flag, sys_flag,
        born_timestamp_ms, bytes born_host not None, bytes store_host not None, reconsume_times=0,
        prepared_transaction_offset=0,
    ):
        """Add a message; hosts are the bytes of IP address and port. Raises InvalidArgument."""
        cdef _Common common
        self._take_common(
            &common, topic, queue_id, sys_flag, born_timestamp_ms, born_host, store_host,
            reconsume_times, prepared_transaction_offset,
        )
        cdef _Bytes held = _Bytes.__new__(_Bytes, body)
        cdef const uint8_t* text = <const uint8_t*>PyBytes_AS_STRING(properties)
        self._add_one(
            &common, topic, _number32("flag", flag), held.start, held.size, text,
            PyBytes_GET_SIZE(properties), NULL, 0, False, NULL, 0,
        )

    def add_send(
        self, SendFrame send not None, bytes topic not None, int32_t queue_id, int32_t more_flags,
        bytes cluster not None, bytes born_host not None, bytes store_host not None,
    ):
        """Add a message as a producer sent it; return whether its sender waits for the disk."""
        cdef _Common common
        cdef const uint8_t* text = send.props_ptr
        if _is_special(text, send.props_len):
            return None
        _check_host(born_host)
        _check_host(store_host)
        common.topic = <const uint8_t*>PyBytes_AS_STRING(topic)
        common.topic_bytes = PyBytes_GET_SIZE(topic)
        common.queue_id = queue_id
        common.sys_flag = send.sys_flag | more_flags
        common.born_timestamp_ms = send.born_timestamp
        common.born_host = <const uint8_t*>PyBytes_AS_STRING(born_host)
        common.born_bytes = PyBytes_GET_SIZE(born_host)
        common.store_host = <const uint8_t*>PyBytes_AS_STRING(store_host)
        common.store_bytes = PyBytes_GET_SIZE(store_host)
        common.reconsume_times = send.reconsume_times
        common.prepared = 0
        cdef _Popped popped = _popped(text, send.props_len, b"WAIT", 4)
        self._add_one(
            &common, topic, send.message_flag, send.body_ptr, send.body_len, text, popped.before,
            popped.rest, popped.rest_bytes, popped.before + popped.rest_bytes > 0,
            <const uint8_t*>PyBytes_AS_STRING(cluster), PyBytes_GET_SIZE(cluster),
        )
        return popped.value == NULL or _is_true(popped.value, popped.value_bytes)

    cdef int _take_common(
        self, _Common* common, bytes topic, queue_id, sys_flag, born_timestamp_ms,
        bytes born_host, bytes store_host, reconsume_times, prepared,
    ) except -1:
        _check_host(born_host)
        _check_host(store_host)
        common.topic = <const uint8_t*>PyBytes_AS_STRING(topic)
        common.topic_bytes = PyBytes_GET_SIZE(topic)
        common.queue_id = _number32("queue_id", queue_id)
        common.sys_flag = _number32("sys_flag", sys_flag)
        common.born_timestamp_ms = _number64("born_timestamp_ms", born_timestamp_ms)
        common.born_host = <const uint8_t*>PyBytes_AS_STRING(born_host)
        common.born_bytes = PyBytes_GET_SIZE(born_host)
        common.store_host = <const uint8_t*>PyBytes_AS_STRING(store_host)
        common.store_bytes = PyBytes_GET_SIZE(store_host)
        common.reconsume_times = _number32("reconsume_times", reconsume_times)
        common.prepared = _number64("prepared_transaction_offset", prepared)
        return 0

    cdef int _add_one(
        self, _Common* common, bytes topic, int32_t flag, const uint8_t* body,
        Py_ssize_t body_bytes, const uint8_t* text, Py_ssize_t text_bytes, const uint8_t* rest,
        Py_ssize_t rest_bytes, bint has_mark, const uint8_t* last, Py_ssize_t last_bytes,
    ) except -1:
        """Add a message; see `_append` for its properties."""
        cdef Py_ssize_t begin = self.used
        self._reserve_rows()
        self._append(
            common, flag, body, body_bytes, text, text_bytes, rest, rest_bytes, has_mark, last,
            last_bytes,
        )
        try:
            number = -1 if common.sys_flag & _INVISIBLE else self._queue(topic, common.queue_id)
        except BaseException:
            self.used = begin
            raise
        self.starts[self.record_count] = begin
        self._end_group(number, 1)
        return 0

    cdef int _append(
        self, _Common* common, int32_t flag, const uint8_t* body, Py_ssize_t body_bytes,
        const uint8_t* text, Py_ssize_t text_bytes, const uint8_t* rest, Py_ssize_t rest_bytes,
        bint has_mark, const uint8_t* last, Py_ssize_t last_bytes,
    ) except -1:
        """Encode a record at the end; nothing is changed if it is refused.

        Its properties are a text and the rest of it, perhaps an end mark, and a last part.
        """
        cdef Py_ssize_t all_bytes = text_bytes + rest_bytes + has_mark + last_bytes
        if not 0 < common.topic_bytes <= _TOPIC_BYTES_MAX:
            raise InvalidArgument(
                f"topic must be 1 to {_TOPIC_BYTES_MAX} bytes, got {common.topic_bytes}"
            )
        if common.queue_id < 0 or not _is_topic_name(common.topic, common.topic_bytes):
            topic = PyBytes_FromStringAndSize(<const char*>common.topic, common.topic_bytes)
            raise InvalidArgument(
                f"queue {topic!r}, {common.queue_id}: the topic must be able to name a directory"
                " and the number must not be negative"
            )
        if all_bytes > _TEXT_BYTES_MAX:
            raise InvalidArgument(
                f"properties must be at most {_TEXT_BYTES_MAX} bytes, got {all_bytes}"
            )
        cdef Py_ssize_t fixed = _FIXED_BYTES - 3 + common.born_bytes + common.store_bytes - 16
        cdef Py_ssize_t size = fixed + 3 + body_bytes + common.topic_bytes + all_bytes
        if size > self.record_bytes_max:
            raise InvalidArgument(
                f"a message must be at most {self.record_bytes_max} bytes, got {size}"
            )
        if self.used + size > self.capacity:
            self._grow(size)
        cdef uint8_t* p = self.start + self.used
        cdef uint32_t bits = (0x10 if common.born_bytes == 20 else 0) | (
            0x20 if common.store_bytes == 20 else 0
        )
        _put_u32(p, <uint32_t>size)
        _put_u32(p + 4, _MAGIC)
        _put_u32(p + 8, c_body_crc(body, body_bytes))
        _put_u32(p + 12, <uint32_t>common.queue_id)
        _put_u32(p + 16, <uint32_t>flag)
        _put_i64(p + 20, 0)
        _put_i64(p + 28, 0)
        _put_u32(p + 36, (<uint32_t>common.sys_flag & ~<uint32_t>0x30) | bits)
        _put_i64(p + 40, common.born_timestamp_ms)
        p += 48
        memcpy(p, common.born_host, common.born_bytes)
        p += common.born_bytes
        _put_i64(p, 0)
        p += 8
        memcpy(p, common.store_host, common.store_bytes)
        p += common.store_bytes
        _put_u32(p, <uint32_t>common.reconsume_times)
        _put_i64(p + 4, common.prepared)
        _put_u32(p + 12, <uint32_t>body_bytes)
        p += 16
        if body_bytes:
            memcpy(p, body, body_bytes)
        p += body_bytes
        p[0] = <uint8_t>common.topic_bytes
        memcpy(p + 1, common.topic, common.topic_bytes)
        p += 1 + common.topic_bytes
        p[0] = <uint8_t>(all_bytes >> 8)
        p[1] = <uint8_t>(all_bytes & 0xFF)
        p += 2
        if text_bytes:
            memcpy(p, text, text_bytes)
        if rest_bytes:
            memcpy(p + text_bytes, rest, rest_bytes)
        if has_mark:
            p[text_bytes + rest_bytes] = 2
        if last_bytes:
            memcpy(p + text_bytes + rest_bytes + has_mark, last, last_bytes)
        if all_bytes and memchr(p, 0, all_bytes) != NULL:
            wrong = PyBytes_FromStringAndSize(<const char*>p, all_bytes)
            raise InvalidArgument(f"properties must not contain a zero byte, got {wrong!r}")
        self.used += size
        return 0

    def add_batch(
        self, bytes topic not None, queue_id, data, bytes shared not None, sys_flag,
        born_timestamp_ms, bytes born_host not None, bytes store_host not None, reconsume_times=0,
        Py_ssize_t messages_max=2**31 - 1,
    ):
        """Add the messages in the body of a batch; return how many there are."""
        cdef _Common common
        self._take_common(
            &common, topic, queue_id, sys_flag, born_timestamp_ms, born_host, store_host,
            reconsume_times, 0,
        )
        if common.sys_flag & _INVISIBLE:
            raise InvalidArgument("a batch cannot be transactional")
        cdef _Bytes held = _Bytes.__new__(_Bytes, data)
        cdef Py_ssize_t count = _count_batch(held.start, held.size)
        if count == 0:
            raise InvalidArgument("a batch must have at least one message")
        if count > messages_max:
            raise InvalidArgument(
                f"a batch must have at most {messages_max} messages, whose ids fit into a response,"
                f" got {count}"
            )
        cdef Py_ssize_t begin = self.used, number
        cdef Py_ssize_t records = self.record_count
        try:
            self._append_batch(&common, held, shared)
            if self.used - begin > self.group_bytes_max:
                raise InvalidArgument(
                    f"a batch must be at most {self.group_bytes_max} bytes, got {self.used - begin}"
                )
            number = self._queue(topic, common.queue_id)
        except BaseException:
            self.used = begin
            self.record_count = records
            raise
        self.record_count = records
        self._end_group(number, count)
        return count

    cdef int _append_batch(self, _Common* common, _Bytes held, bytes shared) except -1:
        cdef const uint8_t* p = held.start
        cdef const uint8_t* end = held.start + held.size
        cdef const uint8_t* text
        cdef Py_ssize_t length, text_bytes
        while p < end:
            self._reserve_rows()
            length = _be_i32(p + 16)
            text = p + _BATCH_HEAD_BYTES + length + 2
            text_bytes = p + _be_i32(p) - text
            self.starts[self.record_count] = self.used
            self._append(
                common, _be_i32(p + 12), p + _BATCH_HEAD_BYTES, length, text, text_bytes, NULL, 0,
                text_bytes > 0 and text[text_bytes - 1] != 2,
                <const uint8_t*>PyBytes_AS_STRING(shared), PyBytes_GET_SIZE(shared),
            )
            self.record_count += 1
            p += _be_i32(p)
        return 0

    cdef Py_ssize_t _queue(self, bytes topic, int64_t queue_id) except -1:
        """Return the number of a queue in the block."""
        if topic is self.last_topic and queue_id == self.last_queue_id:
            return self.last_number
        if self.queue_numbers is None:
            self.queue_numbers = {}
        key = (topic, queue_id)
        number = self.queue_numbers.get(key)
        if number is None:
            self.queue_numbers[key] = number = len(self.queue_list)
            self.queue_list.append(key)
        self.last_topic, self.last_queue_id, self.last_number = topic, queue_id, number
        return number

    cdef int _grow(self, Py_ssize_t size) except -1:
        cdef Py_ssize_t capacity = max(1024, 2 * self.capacity)
        while capacity < self.used + size:
            capacity = self.used + size
        PyByteArray_Resize(self.data, capacity)
        self.start = <uint8_t*>PyByteArray_AS_STRING(self.data)
        self.capacity = capacity
        return 0

    cdef int _reserve_rows(self) except -1:
        """Make room for one more group and one more record."""
        cdef Py_ssize_t capacity
        cdef void* grown
        if self.group_count == self.group_capacity:
            capacity = max(8, 2 * self.group_capacity)
            grown = realloc(self.groups, capacity * sizeof(_Group))
            if grown == NULL:
                raise MemoryError()
            self.groups = <_Group*>grown
            self.group_capacity = capacity
        if self.record_count == self.record_capacity:
            capacity = max(8, 2 * self.record_capacity)
            grown = realloc(self.starts, capacity * sizeof(int64_t))
            if grown == NULL:
                raise MemoryError()
            self.starts = <int64_t*>grown
            self.record_capacity = capacity
        return 0

    cdef void _end_group(self, Py_ssize_t queue, Py_ssize_t count) noexcept:
        cdef _Group* group = self.groups + self.group_count
        group.queue = queue
        group.first = self.record_count
        group.count = count
        group.end = self.used
        group.queue_offset = 0
        self.record_count += count
        self.group_count += 1

    # --- placing ----------------------------------------------------------------------------------

    def fitting(self, Py_ssize_t first, Py_ssize_t room):
        """Return how many groups fit into ``room`` bytes, from one on."""
        cdef Py_ssize_t begin = self._begin(first)
        cdef Py_ssize_t number = first
        while number < self.group_count and self.groups[number].end - begin <= room:
            number += 1
        return number - first

    def place(
        self, Py_ssize_t first, Py_ssize_t count, int64_t position, list offsets not None,
        int64_t store_timestamp_ms,
    ):
        """Assign the next groups a position, queue offsets and a timestamp; return their bytes."""
        # Not an assert statement: records that are placed twice would be written elsewhere.
        if first != self.placed:
            raise AssertionError("groups are placed in order")
        cdef Py_ssize_t begin = self._begin(first)
        cdef Py_ssize_t number, record
        cdef int64_t offset
        cdef _Group* group
        cdef uint8_t* p
        count = min(count, self.group_count - first)
        for number in range(first, first + count):
            group = self.groups + number
            if group.queue >= len(offsets):
                raise IndexError("list index out of range")
            offset = offsets[group.queue] if group.queue >= 0 else 0
            group.queue_offset = offset
            for record in range(group.first, group.first + group.count):
                p = self.start + self.starts[record]
                self.starts[record] = position + self.starts[record] - begin
                _put_i64(p + 20, offset + record - group.first)
                _put_i64(p + 28, self.starts[record])
                _put_i64(p + _time_at(p), store_timestamp_ms)
            if group.queue >= 0:
                offsets[group.queue] = offset + group.count
            self.placed += 1
        return memoryview(self.data)[begin : self._begin(first + count)]

    def positions(self, Py_ssize_t number):
        """Return the positions of the messages of a placed group."""
        cdef _Group* group = self._placed_group(number)
        cdef array.array found = array.clone(_LONGS, group.count, False)
        memcpy(found.data.as_voidptr, self.starts + group.first, group.count * sizeof(int64_t))
        return found

    def queue_offset(self, Py_ssize_t number):
        """Return the queue offset of the first message of a placed group."""
        return self._placed_group(number).queue_offset

    def group_size(self, Py_ssize_t number):
        """Return the bytes of a group."""
        if not 0 <= number < self.group_count:
            raise IndexError("list index out of range")
        return self.groups[number].end - self._begin(number)

    cdef _Group* _placed_group(self, Py_ssize_t number) except NULL:
        if not 0 <= number < self.placed:
            raise IndexError("list index out of range")
        return self.groups + number

    cdef Py_ssize_t _begin(self, Py_ssize_t number) except -1:
        if not 0 <= number <= self.group_count:
            raise IndexError("list index out of range")
        return self.groups[number - 1].end if number else 0


cdef bint _contains(
    const uint8_t* text, Py_ssize_t size, const char* word, Py_ssize_t word_bytes
) noexcept nogil:
    cdef const uint8_t* end
    cdef const uint8_t* p = text
    # Properties that are missing have no text at all.
    if size < word_bytes:
        return False
    end = text + size - word_bytes + 1
    while p < end:
        p = <const uint8_t*>memchr(p, word[0], end - p)
        if p == NULL:
            return False
        if memcmp(p, word, word_bytes) == 0:
            return True
        p += 1
    return False


cdef inline bint _is_special(const uint8_t* text, Py_ssize_t size) noexcept nogil:
    """Whether a message may be delayed or transactional."""
    return _contains(text, size, b"DELAY", 5) or _contains(text, size, b"TRAN_MSG", 8)


cdef inline bint _is_true(const uint8_t* value, Py_ssize_t size) noexcept nogil:
    return size == 4 and (
        (value[0] | 0x20) == c"t" and (value[1] | 0x20) == c"r"
        and (value[2] | 0x20) == c"u" and (value[3] | 0x20) == c"e"
    )


cdef Py_ssize_t _count_batch(const uint8_t* data, Py_ssize_t size) except -1:
    """Check the messages in the body of a batch; return how many there are."""
    cdef Py_ssize_t at = 0, count = 0
    cdef int64_t message_bytes, length, text_bytes
    cdef const uint8_t* p
    while at < size:
        p = data + at
        if size - at < _BATCH_BYTES_MIN:
            raise BodyError("batch ends inside a message", at)
        message_bytes = _be_i32(p)
        length = _be_i32(p + 16)
        text_bytes = message_bytes - _BATCH_BYTES_MIN - length
        if length < 0 or text_bytes < 0 or message_bytes > size - at:
            raise BodyError(f"batch message of {message_bytes} bytes with a body of {length}", at)
        if <uint16_t>_be_i16(p + _BATCH_HEAD_BYTES + length) != text_bytes:
            raise BodyError(f"batch message of {message_bytes} bytes with other lengths in it", at)
        at += message_bytes
        count += 1
    return count
