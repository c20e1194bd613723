# Rows of Arrow columns as the messages of a batch, each with its properties in their text form.

cdef enum:
    _ENTRY_BYTES_MIN = 22
    _NAME_KEPT = 0
    _NAME_LEFT_OUT = 1
    _NAME_SPECIAL = 2


class TextColumn(_NamedTuple):
    """The buffers of an Arrow array of strings or binaries."""

    validity: object
    offsets: object
    data: object
    first: object


class ListColumn(_NamedTuple):
    """The buffers of an Arrow array of lists or maps, without their elements."""

    validity: object
    offsets: object
    first: object


class RowColumns(_NamedTuple):
    """The columns of rows to send; None for those that they do not have."""

    bodies: object
    tags: object = None
    keys: object = None
    key_lists: object = None
    names: object = None
    values: object = None
    maps: object = None


class RowStyle(_NamedTuple):
    """What all rows of a write have in common."""

    body_bytes_max: object
    stamp: object
    stamp_name: object
    is_stamp_key: object
    left_out: object
    refused: object


cdef class _Column:
    """An Arrow array; each access is checked."""

    cdef _Bytes validity
    cdef _Bytes offsets
    cdef _Bytes data
    cdef Py_ssize_t first

    def __cinit__(self, column):
        self.validity = None if column.validity is None else _Bytes.__new__(_Bytes, column.validity)
        self.offsets = _Bytes.__new__(_Bytes, column.offsets)
        data = getattr(column, "data", None)
        self.data = _Bytes.__new__(_Bytes, b"" if data is None else data)
        self.first = column.first

    cdef bint is_valid(self, Py_ssize_t number) except -1:
        if number < 0:
            raise ValueError(f"no element {number}")
        if self.validity is None:
            return True
        if number >> 3 >= self.validity.size:
            raise ValueError(f"no element {number}")
        return self.validity.start[number >> 3] >> (number & 7) & 1

    cdef int range(self, Py_ssize_t number, int32_t* start, int32_t* end) except -1:
        if number >= self.offsets.size // 4 - 1:
            raise ValueError(f"no element {number}")
        memcpy(start, self.offsets.start + 4 * number, 4)
        memcpy(end, self.offsets.start + 4 * number + 4, 4)
        if not 0 <= start[0] <= end[0]:
            raise ValueError(f"a value lies between {start[0]} and {end[0]}")
        return 0

    cdef int value(self, Py_ssize_t row, _Place* place) except -1:
        """Find a value; null has no start."""
        cdef int32_t start, end
        place.start = NULL
        place.size = 0
        if not self.is_valid(self.first + row):
            return 0
        self.range(self.first + row, &start, &end)
        if end > self.data.size:
            raise ValueError(f"a value ends at byte {end} of {self.data.size}")
        # An empty buffer may have no address.
        place.start = self.data.start + start if self.data.start != NULL else <const uint8_t*>b""
        place.size = end - start
        return 0

    cdef int elements(self, Py_ssize_t row, int32_t* start, int32_t* end) except -1:
        start[0] = end[0] = 0
        if self.is_valid(self.first + row):
            self.range(self.first + row, start, end)
        return 0


cdef _Column _column(column):
    return None if column is None else _Column.__new__(_Column, column)


cdef inline bint _is_plain(const _Place* text) noexcept nogil:
    """Whether a text has no blanks, separators or other than ASCII characters, and is not empty."""
    cdef Py_ssize_t number
    cdef bint is_other = False
    for number in range(text.size):
        is_other |= <uint8_t>(text.start[number] - 0x21) > 0x7E - 0x21
    return text.size > 0 and not is_other


cdef inline bint _has_marks(const _Place* text) noexcept nogil:
    cdef Py_ssize_t number
    for number in range(text.size):
        if text.start[number] == 1 or text.start[number] == 2:
            return True
    return False


cdef inline str _decoded(const _Place* text):
    return PyUnicode_DecodeUTF8(<const char*>text.start, text.size, b"replace")


cdef bint _is_text(const _Place* text) except -1:
    cdef Py_ssize_t number
    if _is_plain(text):
        return True
    if _has_marks(text):
        return False
    for number in range(text.size):
        if 0x21 <= text.start[number] <= 0x7E:
            return True
    return bool(_decoded(text).strip())


cdef class _Names:
    """What to do with properties of a name; those of the last rows are known without an object."""

    cdef frozenset left_out
    cdef frozenset refused
    cdef dict known
    cdef _Place[_RECENT] recent
    cdef int[_RECENT] recent_fates

    def __cinit__(self, left_out, refused):
        self.left_out = left_out
        self.refused = refused
        self.known = {}

    cdef int fate(self, const _Place* name) except -1:
        cdef uint32_t slot = <uint32_t>name.size
        if name.size >= 4:
            slot += _be_u32(name.start + name.size - 4)
        slot = (slot * <uint32_t>0x9E3779B1) >> 26
        cdef _Place* recent = self.recent + slot
        if recent.start != NULL and recent.size == name.size and (
            memcmp(recent.start, name.start, name.size) == 0
        ):
            return self.recent_fates[slot]
        own = PyBytes_FromStringAndSize(<const char*>name.start, name.size)
        fate = _NAME_KEPT
        if own in self.left_out:
            fate = _NAME_LEFT_OUT
        elif own in self.refused or not _is_text(name):
            fate = _NAME_SPECIAL
        recent[0] = name[0]
        self.recent_fates[slot] = fate
        return fate


cdef bint _have_same(const _Place* names, Py_ssize_t count) except -1:
    """Whether two names are the same."""
    cdef Py_ssize_t number, other
    cdef set found
    if count > _FEW_ENTRIES:
        found = set()
        for number in range(count):
            found.add(PyBytes_FromStringAndSize(<const char*>names[number].start, names[number].size))
        return len(found) < count
    for number in range(count):
        for other in range(number):
            if names[other].size == names[number].size and memcmp(
                names[other].start, names[number].start, names[number].size
            ) == 0:
                return True
    return False


cdef class _RowEncoder:
    """Encodes rows one after another; see `encode_rows`."""

    cdef _Column bodies
    cdef _Column tags
    cdef _Column keys
    cdef _Column key_lists
    cdef _Column names
    cdef _Column values
    cdef _Column maps
    cdef _Names fates
    cdef Py_ssize_t body_bytes_max
    cdef bytes stamp
    cdef bytes stamp_mark
    cdef bint is_stamp_key
    cdef bytes unique_mark
    cdef bytearray data
    cdef uint8_t* start
    cdef Py_ssize_t used
    cdef Py_ssize_t capacity
    cdef _Memory seen  # Names of properties of the current row.
    cdef Py_ssize_t seen_capacity

    def __cinit__(self, columns, bytes id_prefix, style):
        self.bodies = _Column.__new__(_Column, columns.bodies)
        self.tags = _column(columns.tags)
        self.keys = _column(columns.keys)
        self.key_lists = None if columns.keys is None else _column(columns.key_lists)
        if columns.names is not None and columns.values is not None and columns.maps is not None:
            self.names = _column(columns.names)
            self.values = _column(columns.values)
            self.maps = _column(columns.maps)
        self.fates = _Names.__new__(_Names, style.left_out, style.refused)
        self.body_bytes_max = style.body_bytes_max
        self.stamp = style.stamp
        self.stamp_mark = b"\x02" + style.stamp_name + b"\x01"
        self.is_stamp_key = style.is_stamp_key and style.stamp is not None
        self.unique_mark = b"UNIQ_KEY\x01" + id_prefix
        self.data = bytearray()
        self.seen = _memory(0)

    cdef int reserve(self, Py_ssize_t size) except -1:
        if self.used + size > self.capacity:
            self.capacity = max(2 * self.capacity, self.used + size, 4096)
            PyByteArray_Resize(self.data, self.capacity)
            self.start = <uint8_t*>PyByteArray_AS_STRING(self.data)
        return 0

    cdef int put(self, const void* data, Py_ssize_t size) except -1:
        self.reserve(size)
        _copy_bytes(self.start + self.used, <const uint8_t*>data, size)
        self.used += size
        return 0

    cdef int put_bytes(self, bytes data) except -1:
        return self.put(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))

    cdef int put_number(self, int64_t number) except -1:
        cdef uint8_t[20] digits
        cdef Py_ssize_t at = 20
        cdef uint64_t left = 0 - <uint64_t>number if number < 0 else <uint64_t>number
        while True:
            at -= 1
            digits[at] = c"0" + left % 10
            left //= 10
            if left == 0:
                break
        if number < 0:
            self.put(b"-", 1)
        return self.put(digits + at, 20 - at)

    cdef bint row(self, Py_ssize_t row, int64_t number, uint32_t counter, bytes text) except -1:
        """Encode a row; return whether that worked."""
        cdef _Place body
        cdef Py_ssize_t begin = self.used, text_at
        cdef uint8_t* head
        cdef bint is_encoded = True
        self.bodies.value(row, &body)
        if not 0 < body.size <= self.body_bytes_max:
            return False
        self.reserve(_ENTRY_BYTES_MIN + body.size)
        memset(self.start + begin, 0, 20)
        _copy_bytes(self.start + begin + 20, body.start, body.size)
        text_at = begin + 20 + body.size + 2
        self.used = text_at
        if text is None:
            is_encoded = self.properties(row, number, counter)
        else:
            self.put_bytes(text)
        if not is_encoded or self.used - text_at > _TEXT_BYTES_MAX:
            self.used = begin
            return False
        head = self.start + begin
        _put_u32(head, <uint32_t>(self.used - begin))
        _put_u32(head + 16, <uint32_t>body.size)
        head = self.start + text_at - 2
        head[0] = (self.used - text_at) >> 8
        head[1] = (self.used - text_at) & 0xFF
        return True

    cdef bint properties(self, Py_ssize_t row, int64_t number, uint32_t counter) except -1:
        cdef uint8_t[2] counter_bytes
        cdef _Place tags
        self.put_bytes(self.unique_mark)
        self.reserve(4)
        counter_bytes[0] = counter >> 8 & 0xFF
        counter_bytes[1] = counter & 0xFF
        _hex_digits(self.start + self.used, counter_bytes, 2)
        self.used += 4
        self.put(b"\x02WAIT\x01true", 10)
        if self.tags is not None:
            self.tags.value(row, &tags)
            if tags.start != NULL:
                if not _is_text(&tags):
                    return False
                self.put(b"\x02TAGS\x01", 6)
                self.put(tags.start, tags.size)
        if not self.put_keys(row, number) or not self.put_own(row):
            return False
        if self.stamp is not None:
            self.put_bytes(self.stamp_mark)
            self.put_stamp(number)
        return True

    cdef int put_stamp(self, int64_t number) except -1:
        self.put_bytes(self.stamp)
        return self.put_number(number)

    cdef bint put_keys(self, Py_ssize_t row, int64_t number) except -1:
        cdef Py_ssize_t begin = self.used, keys_at
        cdef _Place key
        cdef int32_t element, end
        self.put(b"\x02KEYS\x01", 6)
        keys_at = self.used
        if self.keys is None:
            pass
        elif self.key_lists is None:
            self.keys.value(row, &key)
            if _has_marks(&key):
                return False
            if _is_plain(&key):
                self.put(key.start, key.size)
            elif key.size:
                self.put_bytes(" ".join(_decoded(&key).split()).encode())
        else:
            self.key_lists.elements(row, &element, &end)
            while element < end:
                self.keys.value(element, &key)
                if key.start == NULL or _has_marks(&key):
                    return False
                if self.used > keys_at:
                    self.put(b" ", 1)
                if _is_plain(&key):
                    self.put(key.start, key.size)
                else:
                    decoded = _decoded(&key)
                    if decoded.split() != [decoded]:
                        return False
                    self.put_bytes(decoded.encode())
                element += 1
        if self.is_stamp_key:
            if self.used > keys_at:
                self.put(b" ", 1)
            self.put_stamp(number)
        elif self.used == keys_at:
            self.used = begin
        return True

    cdef bint put_own(self, Py_ssize_t row) except -1:
        """Add the user's properties."""
        cdef int32_t element, end
        cdef Py_ssize_t count = 0
        cdef _Place name
        cdef _Place value
        cdef int fate
        cdef void* grown
        if self.maps is None:
            return True
        self.maps.elements(row, &element, &end)
        while element < end:
            self.names.value(element, &name)
            if name.start == NULL:
                return False
            self.values.value(element, &value)
            element += 1
            fate = self.fates.fate(&name)
            if fate == _NAME_LEFT_OUT:
                continue
            if fate == _NAME_SPECIAL or value.start == NULL or not _is_text(&value):
                return False
            if count == self.seen_capacity:
                self.seen_capacity = max(16, 2 * self.seen_capacity)
                grown = realloc(self.seen.start, self.seen_capacity * sizeof(_Place))
                if grown == NULL:
                    raise MemoryError()
                self.seen.start = grown
            (<_Place*>self.seen.start)[count] = name
            count += 1
            self.put(b"\x02", 1)
            self.put(name.start, name.size)
            self.put(b"\x01", 1)
            self.put(value.start, value.size)
        return count < 2 or not _have_same(<_Place*>self.seen.start, count)


def encode_rows(
    columns, Py_ssize_t count, int64_t first_row, bytes id_prefix, uint32_t first_id, style,
    dict texts,
):
    """Encode rows as the messages of a batch, and return where each ends, their bytes, and others."""
    if count < 0:
        raise ValueError(f"rows must be at least 0, got {count}")
    cdef _RowEncoder encoder = _RowEncoder.__new__(_RowEncoder, columns, id_prefix, style)
    cdef array.array ends = array.clone(_LONGS, count + 1, False)
    cdef list special = []
    cdef bytes text = None
    cdef bint has_texts = len(texts) > 0
    cdef Py_ssize_t row
    ends.data.as_longlongs[0] = 0
    for row in range(count):
        if has_texts:
            text = texts.get(row)
        if not encoder.row(row, first_row + row, <uint32_t>(first_id + row), text):
            special.append(row)
        ends.data.as_longlongs[row + 1] = encoder.used
    PyByteArray_Resize(encoder.data, encoder.used)
    return ends, encoder.data, special
