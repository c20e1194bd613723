# Columns of stored records: each field of many records as the buffers of an Arrow array.

from libc.string cimport memset

from typing import NamedTuple as _NamedTuple

cdef enum:
    _ALL_BYTES_MAX = 0x7FFFFFFF
    _RECENT = 64  # Distinct values that are found without creating an object.
    _FEW_ENTRIES = 24  # Up to here, comparing each name with each other is fastest.

cdef int64_t _EARLIEST_MS = -62135596800000
cdef int64_t _LATEST_MS = 253402300799999


cdef extern from *:
    """
    #if defined(__SSE2__)
    #include <emmintrin.h>
    #endif

    /* Notes where bytes 1 and 2 are in n bytes, and returns how many there are; is_ascii is cleared
       if one of the bytes is not. Bytes up to n rounded up to 16 are readable if `room` says so. */
    static size_t marks_of(
        const uint8_t *p, size_t n, size_t room, int32_t *marks, int *is_ascii
    ) {
        size_t count = 0, at = 0;
        unsigned high = 0;
    #if defined(__SSE2__)
        const __m128i one = _mm_set1_epi8(1), two = _mm_set1_epi8(2);
        for (; at < n && room - at >= 16; at += 16) {
            __m128i x = _mm_loadu_si128((const __m128i *)(p + at));
            unsigned within = n - at < 16 ? (1u << (n - at)) - 1 : 0xFFFF;
            unsigned mask = within & (unsigned)_mm_movemask_epi8(
                _mm_or_si128(_mm_cmpeq_epi8(x, one), _mm_cmpeq_epi8(x, two)));
            high |= within & (unsigned)_mm_movemask_epi8(x);
            for (; mask; mask &= mask - 1)
                marks[count++] = (int32_t)(at + (size_t)__builtin_ctz(mask));
        }
    #endif
        for (; at < n; at++) {
            high |= p[at] & 0x80u;
            if (p[at] == 1 || p[at] == 2)
                marks[count++] = (int32_t)at;
        }
        if (high)
            *is_ascii = 0;
        return count;
    }
    """
    size_t marks_of(
        const uint8_t* p, size_t n, size_t room, int32_t* marks, int* is_ascii
    ) noexcept nogil


class Texts(_NamedTuple):
    """Byte strings as Arrow has them: those of one row lie between two offsets."""

    validity: object
    offsets: object
    data: object


class Times(_NamedTuple):
    """Microseconds since 1970."""

    validity: object
    values: object


class Maps(_NamedTuple):
    """Maps of strings: the entries of one row lie between two of ``firsts``."""

    firsts: object
    names: object
    values: object


cdef struct _Cell:
    # Where a record lies in the buffer, and its parts from its start.
    int64_t at
    int32_t body_at
    int32_t body_end
    int32_t topic_at
    int32_t text_at
    int32_t time_at  # Of its store time; read once, as the buffer may change.
    int32_t size
    int32_t span


cdef struct _Entry:
    # A property; its value is a byte after its name.
    const uint8_t* name
    int32_t name_bytes
    int32_t value_bytes


cdef class _Memory:
    """Memory that is freed with its owner."""

    cdef void* start

    def __dealloc__(self):
        free(self.start)


cdef _Memory _memory(size_t size):
    cdef _Memory memory = _Memory.__new__(_Memory)
    memory.start = malloc(size if size else 1)
    if memory.start == NULL:
        raise MemoryError()
    return memory


cdef bint _cell_at(const uint8_t* data, Py_ssize_t at, Py_ssize_t end, _Cell* cell) noexcept:
    """Read where the parts of the record at a place are, if it is complete by ``end``."""
    cdef Py_ssize_t left = end - at
    if left < _FIXED_BYTES:
        return False
    cdef const uint8_t* p = data + at
    cdef Py_ssize_t fixed = _fixed_bytes(p)
    if left < fixed:
        return False
    cdef int64_t size = _be_i32(p)
    cdef uint32_t magic = _be_u32(p + 4)
    cdef int64_t body_length = _be_i32(p + fixed - 4)
    cdef int64_t body_end = fixed + body_length
    cdef int64_t topic_at = body_end + (1 if magic == _MAGIC else 2)
    if (magic != _MAGIC and magic != _MAGIC_V2) or size > left or body_length < 0:
        return False
    if topic_at > size:
        return False
    cdef int64_t topic_bytes = p[body_end] if magic == _MAGIC else _be_i16(p + body_end)
    cdef int64_t text_at = topic_at + topic_bytes + 2
    if topic_bytes < 0 or text_at > size or text_at + _be_i16(p + text_at - 2) != size:
        return False
    cell.at = at
    cell.body_at = <int32_t>fixed
    cell.body_end = <int32_t>body_end
    cell.topic_at = <int32_t>topic_at
    cell.text_at = <int32_t>text_at
    cell.time_at = <int32_t>_time_at(p)
    cell.size = <int32_t>size
    return True


def scan_records(data, spans=None):
    """Find records that lie back to back in a buffer, or in parts of it, given in its order."""
    cdef _Bytes held = _Bytes.__new__(_Bytes, data)
    if held.size > _ALL_BYTES_MAX:
        raise InvalidArgument(f"records must be at most {_ALL_BYTES_MAX} bytes, got {held.size}")
    cdef list parts = [(0, held.size)] if spans is None else list(spans)
    cdef Py_ssize_t capacity = 0, count = 0, at, end
    cdef _Memory cells = _memory(0)
    cdef _Cell* cell
    cdef void* grown
    for number, (first, last) in enumerate(parts):
        if not 0 <= first <= last:
            raise InvalidArgument(f"records cannot lie between bytes {first} and {last}")
        at, end = first, last
        while at < end:
            if count == capacity:
                capacity = max(64, 2 * capacity)
                grown = realloc(cells.start, capacity * sizeof(_Cell))
                if grown == NULL:
                    raise MemoryError()
                cells.start = grown
            cell = <_Cell*>cells.start + count
            if not _cell_at(held.start, at, min(end, held.size), cell):
                return _table(held, cells, <_Cell*>cells.start, count), at
            cell.span = number
            count += 1
            at += cell.size
    return _table(held, cells, <_Cell*>cells.start, count), None


cdef RecordTable _table(_Bytes held, _Memory memory, _Cell* cells, Py_ssize_t count):
    cdef RecordTable table = RecordTable.__new__(RecordTable)
    table.held = held
    table.memory = memory
    table.cells = cells
    table.count = count
    return table


cdef class RecordTable:
    """Records of a buffer as the rows of a table; it holds the buffer, not copies."""

    cdef _Bytes held
    cdef _Memory memory
    cdef _Cell* cells
    cdef Py_ssize_t count
    # Of the properties, once they are needed.
    cdef _Memory entry_memory
    cdef _Memory first_memory
    cdef list repaired

    def __init__(self):
        raise TypeError("RecordTable is created by scan_records")

    def __len__(self):
        return self.count

    def __getitem__(self, slice rows):
        cdef Py_ssize_t first, end, step
        first, end, step = rows.indices(self.count)
        if step != 1:
            raise ValueError("a RecordTable has slices of step 1 only")
        if end - first == self.count:
            return self
        return _table(self.held, self.memory, self.cells + first, max(0, end - first))

    def where(self, chosen):
        """Return the rows that have a byte other than zero."""
        cdef _Bytes mask = _Bytes.__new__(_Bytes, chosen)
        cdef Py_ssize_t row
        if mask.size != self.count:
            raise ValueError(f"{mask.size} choices for {self.count} records")
        cdef _Memory memory = _memory(self.count * sizeof(_Cell))
        cdef Py_ssize_t count = 0
        for row in range(self.count):
            if mask.start[row]:
                (<_Cell*>memory.start)[count] = self.cells[row]
                count += 1
        return self if count == self.count else _table(
            self.held, memory, <_Cell*>memory.start, count
        )

    def between(self, offsets):
        """Return the rows whose queue offsets are in a range, given for each part of the buffer."""
        cdef array.array starts = _array.array("q", [start for start, _ in offsets])
        cdef array.array ends = _array.array("q", [end for _, end in offsets])
        cdef Py_ssize_t row, parts = len(starts)
        cdef int64_t offset
        cdef bytes mask = PyBytes_FromStringAndSize(NULL, self.count)
        cdef uint8_t* chosen = <uint8_t*>PyBytes_AS_STRING(mask)
        cdef _Cell* cell
        for row in range(self.count):
            cell = self.cells + row
            if cell.span >= parts:
                raise IndexError("list index out of range")
            offset = _be_i64(self.held.start + cell.at + 20)
            chosen[row] = (
                starts.data.as_longlongs[cell.span] <= offset < ends.data.as_longlongs[cell.span]
            )
        return self.where(mask)

    # --- parts of single rows ---------------------------------------------------------------------

    cdef _Cell* _cell(self, number) except NULL:
        cdef Py_ssize_t row = number
        if row < 0:
            row += self.count
        if not 0 <= row < self.count:
            raise IndexError("list index out of range")
        return self.cells + row

    cdef bytes _part(self, _Cell* cell, Py_ssize_t start, Py_ssize_t end):
        return PyBytes_FromStringAndSize(
            <const char*>self.held.start + cell.at + start, end - start
        )

    def record(self, row):
        """Return the bytes of a record."""
        cdef _Cell* cell = self._cell(row)
        return self._part(cell, 0, cell.size)

    def body(self, row):
        """Return a body as it is stored."""
        cdef _Cell* cell = self._cell(row)
        return self._part(cell, cell.body_at, cell.body_end)

    def text(self, row):
        """Return the properties of a record, in their text form."""
        cdef _Cell* cell = self._cell(row)
        return self._part(cell, cell.text_at, cell.size)

    # --- columns of numbers -----------------------------------------------------------------------

    def spans(self):
        """Return which part of the buffer each record is in."""
        cdef array.array found = array.clone(_INTS, self.count, False)
        cdef Py_ssize_t row
        for row in range(self.count):
            found.data.as_ints[row] = self.cells[row].span
        return found

    def starts(self):
        """Return where in the buffer each record starts."""
        cdef array.array found = array.clone(_LONGS, self.count, False)
        cdef Py_ssize_t row
        for row in range(self.count):
            found.data.as_longlongs[row] = self.cells[row].at
        return found

    def sizes(self):
        cdef array.array found = array.clone(_INTS, self.count, False)
        cdef Py_ssize_t row
        for row in range(self.count):
            found.data.as_ints[row] = self.cells[row].size
        return found

    def queue_ids(self):
        return self._ints(12)

    def queue_offsets(self):
        return self._longs(20)

    def physical_offsets(self):
        return self._longs(28)

    def sys_flags(self):
        return self._ints(36)

    def store_times_ms(self):
        cdef array.array found = array.clone(_LONGS, self.count, False)
        cdef _Cell* cell
        cdef Py_ssize_t row
        for row in range(self.count):
            cell = self.cells + row
            found.data.as_longlongs[row] = _be_i64(self.held.start + cell.at + cell.time_at)
        return found

    def reconsume_times(self):
        cdef array.array found = array.clone(_INTS, self.count, False)
        cdef _Cell* cell
        cdef Py_ssize_t row
        for row in range(self.count):
            cell = self.cells + row
            found.data.as_ints[row] = _be_i32(self.held.start + cell.at + cell.body_at - 16)
        return found

    def born_times(self):
        return _time_array(self._longs(40))

    def store_times(self):
        return _time_array(self.store_times_ms())

    cdef array.array _ints(self, Py_ssize_t at):
        cdef array.array found = array.clone(_INTS, self.count, False)
        cdef Py_ssize_t row
        for row in range(self.count):
            found.data.as_ints[row] = _be_i32(self.held.start + self.cells[row].at + at)
        return found

    cdef array.array _longs(self, Py_ssize_t at):
        cdef array.array found = array.clone(_LONGS, self.count, False)
        cdef Py_ssize_t row
        for row in range(self.count):
            found.data.as_longlongs[row] = _be_i64(self.held.start + self.cells[row].at + at)
        return found

    def compressed(self):
        """Return the rows whose bodies are compressed."""
        cdef Py_ssize_t row
        return [
            row for row in range(self.count) if (self.held.start + self.cells[row].at)[39] & 1
        ]

    def damaged_bodies(self):
        """Return the rows whose bodies do not match their checksums."""
        cdef list found = []
        cdef const uint8_t* p
        cdef _Cell* cell
        cdef Py_ssize_t row
        for row in range(self.count):
            cell = self.cells + row
            p = self.held.start + cell.at
            if c_body_crc(p + cell.body_at, cell.body_end - cell.body_at) != _be_u32(p + 8):
                found.append(row)
        return found

    # --- columns of few values --------------------------------------------------------------------

    def topics(self):
        """Return the distinct topics, and each row's index into them."""
        cdef _Distinct found = _Distinct.__new__(_Distinct, self.count)
        cdef _Cell* cell
        cdef Py_ssize_t row
        for row in range(self.count):
            cell = self.cells + row
            found.add(
                row, self.held.start + cell.at + cell.topic_at, cell.text_at - 2 - cell.topic_at
            )
        return found.values, found.indices

    def born_hosts(self):
        """Return the distinct hosts, the bytes of IP address and port, and each row's index."""
        cdef _Distinct found = _Distinct.__new__(_Distinct, self.count)
        cdef _Cell* cell
        cdef Py_ssize_t row
        for row in range(self.count):
            cell = self.cells + row
            found.add(row, self.held.start + cell.at + 48, cell.time_at - 48)
        return found.values, found.indices

    def store_hosts(self):
        cdef _Distinct found = _Distinct.__new__(_Distinct, self.count)
        cdef _Cell* cell
        cdef const uint8_t* p
        cdef Py_ssize_t row, at
        for row in range(self.count):
            cell = self.cells + row
            p = self.held.start + cell.at
            at = cell.time_at + 8
            found.add(row, p + at, cell.body_at - 16 - at)
        return found.values, found.indices

    # --- columns of texts -------------------------------------------------------------------------

    def bodies(self, dict others):
        """Return bodies as they are stored; ``others`` stand in their place, None for null."""
        cdef _Memory memory = _memory(self.count * sizeof(_Place))
        cdef _Place* place = <_Place*>memory.start
        cdef _Cell* cell
        cdef Py_ssize_t row
        cdef bytes other
        cdef bint has_others = len(others) > 0
        for row in range(self.count):
            cell = self.cells + row
            if has_others and row in others:
                other = others[row]
                place.start = NULL
                place.size = 0
                if other is not None:
                    place.start = <const uint8_t*>PyBytes_AS_STRING(other)
                    place.size = PyBytes_GET_SIZE(other)
            else:
                place.start = self.held.start + cell.at + cell.body_at
                place.size = cell.body_end - cell.body_at
            place += 1
        return _text_arrays(<_Place*>memory.start, self.count)

    def offset_ids(self):
        """Return store host and position, in hexadecimal digits."""
        cdef _Memory memory = _memory(self.count * sizeof(_Place))
        cdef _Memory digits = _memory(self.count * 56)
        cdef _Place* places = <_Place*>memory.start
        cdef Py_ssize_t row
        for row in range(self.count):
            self._offset_id(row, <uint8_t*>digits.start + 56 * row, places + row)
        return _text_arrays(places, self.count)

    def message_ids(self):
        """Return unique keys, or offset ids for records without one."""
        cdef _Memory memory = self._values(b"UNIQ_KEY")
        cdef _Place* places = <_Place*>memory.start
        cdef _Memory digits = None
        cdef Py_ssize_t row
        for row in range(self.count):
            if places[row].start == NULL:
                if digits is None:
                    digits = _memory(self.count * 56)
                self._offset_id(row, <uint8_t*>digits.start + 56 * row, places + row)
        return _text_arrays(places, self.count)

    def property_values(self, str name):
        """Return the values of one property, null for records without it."""
        cdef _Memory memory = self._values(name.encode())
        return _text_arrays(<_Place*>memory.start, self.count)

    def properties(self):
        """Return all properties; of a name given twice, the last value counts, in its place."""
        self._parse()
        cdef Py_ssize_t* firsts = <Py_ssize_t*>self.first_memory.start
        cdef _Entry* entries = <_Entry*>self.entry_memory.start
        cdef Py_ssize_t count = firsts[self.count], number
        cdef _Memory memory = _memory(2 * count * sizeof(_Place))
        cdef _Place* names = <_Place*>memory.start
        cdef _Place* values = names + count
        cdef array.array starts = array.clone(_INTS, self.count + 1, False)
        for number in range(self.count + 1):
            starts.data.as_ints[number] = <int>firsts[number]
        for number in range(count):
            names[number].start = entries[number].name
            names[number].size = entries[number].name_bytes
            values[number].start = entries[number].name + entries[number].name_bytes + 1
            values[number].size = entries[number].value_bytes
        return Maps(starts, _text_arrays(names, count), _text_arrays(values, count))

    cdef _offset_id(self, Py_ssize_t row, uint8_t* digits, _Place* place):
        cdef _Cell* cell = self.cells + row
        cdef const uint8_t* p = self.held.start + cell.at
        cdef Py_ssize_t at = cell.time_at + 8, host_bytes = cell.body_at - 16 - at
        place.start = digits
        place.size = 2 * host_bytes + 16
        _hex_digits(digits, p + at, host_bytes)
        _hex_digits(digits + 2 * host_bytes, p + 28, 8)

    cdef _Memory _values(self, bytes name):
        """Return the place of each value of a property."""
        self._parse()
        cdef Py_ssize_t* firsts = <Py_ssize_t*>self.first_memory.start
        cdef _Entry* entry = <_Entry*>self.entry_memory.start
        cdef _Entry* end
        cdef const char* wanted = PyBytes_AS_STRING(name)
        cdef Py_ssize_t wanted_bytes = PyBytes_GET_SIZE(name), row
        cdef _Memory memory = _memory(self.count * sizeof(_Place))
        cdef _Place* place = <_Place*>memory.start
        for row in range(self.count):
            place.start = NULL
            place.size = 0
            end = <_Entry*>self.entry_memory.start + firsts[row + 1]
            while entry < end:
                if entry.name_bytes == wanted_bytes and (
                    memcmp(entry.name, wanted, wanted_bytes) == 0
                ):
                    place.start = entry.name + entry.name_bytes + 1
                    place.size = entry.value_bytes
                entry += 1
            place += 1
        return memory

    cdef int _parse(self) except -1:
        """Find the properties of all rows, once."""
        if self.first_memory is not None:
            return 0
        cdef _Memory firsts = _memory((self.count + 1) * sizeof(Py_ssize_t))
        cdef _Memory entries = _memory(0)
        cdef Py_ssize_t count = 0, capacity = 0, row, first, most
        cdef _Memory marks = _memory(3 * _TEXT_BYTES_MAX * sizeof(int32_t))
        cdef const uint8_t* text
        cdef _Cell* cell
        cdef Py_ssize_t size, found
        cdef int is_ascii
        cdef void* grown
        cdef list repaired = []
        for row in range(self.count):
            cell = self.cells + row
            text = self.held.start + cell.at + cell.text_at
            size = cell.size - cell.text_at
            is_ascii = True
            found = marks_of(
                text, size, self.held.start + self.held.size - text, <int32_t*>marks.start, &is_ascii
            )
            if not is_ascii:
                # At most three bytes for each.
                good = PyUnicode_DecodeUTF8(<const char*>text, size, b"replace")
                repaired.append(good)
                text = <const uint8_t*>PyUnicode_AsUTF8AndSize(good, &size)
                found = marks_of(text, size, size, <int32_t*>marks.start, &is_ascii)
            first = count
            (<Py_ssize_t*>firsts.start)[row] = first
            # An entry has one mark for certain.
            most = count + found
            if most > capacity:
                capacity = max(2 * capacity, most, 8 * self.count)
                grown = realloc(entries.start, capacity * sizeof(_Entry))
                if grown == NULL:
                    raise MemoryError()
                entries.start = grown
            count += _entries_of(
                text, size, <int32_t*>marks.start, found, <_Entry*>entries.start + first
            )
        (<Py_ssize_t*>firsts.start)[self.count] = count
        self.entry_memory = entries
        self.repaired = repaired
        self.first_memory = firsts
        return 0


cdef Py_ssize_t _entries_of(
    const uint8_t* text, Py_ssize_t size, const int32_t* marks, Py_ssize_t mark_count,
    _Entry* entries,
) except -1:
    """Find the well-formed entries of a text whose marks are known; return how many there are."""
    cdef Py_ssize_t number = 0, at = 0, name_end, end, count = 0
    while number < mark_count:
        name_end = marks[number]
        number += 1
        if text[name_end] == 2:
            at = name_end + 1
            continue
        # Other ends of names belong to the value.
        while number < mark_count and text[marks[number]] == 1:
            number += 1
        end = marks[number] if number < mark_count else size
        number += 1
        if name_end > at and end > name_end + 1:
            entries[count].name = text + at
            entries[count].name_bytes = <int32_t>(name_end - at)
            entries[count].value_bytes = <int32_t>(end - name_end - 1)
            count += 1
        at = end + 1
    return _last_of_each_name(entries, count)


cdef inline void _hex_digits(uint8_t* digits, const uint8_t* p, Py_ssize_t size) noexcept nogil:
    cdef const char* known = b"0123456789ABCDEF"
    cdef Py_ssize_t number
    for number in range(size):
        digits[2 * number] = known[p[number] >> 4]
        digits[2 * number + 1] = known[p[number] & 15]


cdef Py_ssize_t _last_of_each_name(_Entry* entries, Py_ssize_t count) except -1:
    """Keep the last entry of each name, in order; return how many there are."""
    cdef Py_ssize_t number, other, kept = 0
    cdef set names
    if count > _FEW_ENTRIES:
        names = set()
        for number in range(count - 1, -1, -1):
            name = PyBytes_FromStringAndSize(
                <const char*>entries[number].name, entries[number].name_bytes
            )
            if name in names:
                entries[number].name = NULL
            names.add(name)
    else:
        for number in range(count):
            for other in range(number + 1, count):
                if entries[other].name_bytes == entries[number].name_bytes and memcmp(
                    entries[other].name, entries[number].name, entries[number].name_bytes
                ) == 0:
                    entries[number].name = NULL
                    break
    for number in range(count):
        if entries[number].name != NULL:
            entries[kept] = entries[number]
            kept += 1
    return kept


cdef class _Distinct:
    """Finds the distinct values of a column with few of them."""

    cdef list values
    cdef array.array indices
    cdef dict numbers
    cdef _Place[_RECENT] recent
    cdef int[_RECENT] recent_numbers

    def __cinit__(self, Py_ssize_t count):
        self.values = []
        self.numbers = {}
        self.indices = array.clone(_INTS, count, False)

    cdef int add(self, Py_ssize_t row, const uint8_t* value, Py_ssize_t size) except -1:
        cdef uint32_t slot = 0
        if size >= 4:
            # What differs are the ends: of ports, and mostly of names.
            slot = (_be_u32(value + size - 4) * <uint32_t>0x9E3779B1) >> 26
        cdef _Place* known = self.recent + slot
        if known.start == NULL or known.size != size or memcmp(known.start, value, size) != 0:
            own = PyBytes_FromStringAndSize(<const char*>value, size)
            number = self.numbers.get(own)
            if number is None:
                self.numbers[own] = number = len(self.values)
                self.values.append(own)
            known.start = value
            known.size = size
            self.recent_numbers[slot] = number
        self.indices.data.as_ints[row] = self.recent_numbers[slot]
        return 0


cdef _time_array(array.array times_ms):
    """Return microseconds, and null for what no timestamp can show."""
    cdef Py_ssize_t row, count = len(times_ms)
    cdef int64_t* values = <int64_t*>times_ms.data.as_voidptr
    cdef bytes bits = None
    for row in range(count):
        if _EARLIEST_MS <= values[row] <= _LATEST_MS:
            values[row] *= 1000
        else:
            values[row] = 0
            bits = _all_valid(count) if bits is None else bits
            (<uint8_t*>PyBytes_AS_STRING(bits))[row >> 3] &= ~(1 << (row & 7))
    return Times(bits, times_ms)


cdef bytes _all_valid(Py_ssize_t count):
    """Return a bit for each row; those beyond the last are zero."""
    cdef bytes bits = PyBytes_FromStringAndSize(NULL, (count + 7) // 8)
    cdef uint8_t* start = <uint8_t*>PyBytes_AS_STRING(bits)
    memset(start, 0xFF, PyBytes_GET_SIZE(bits))
    if count & 7:
        start[count >> 3] = (1 << (count & 7)) - 1
    return bits


cdef inline void _copy_bytes(uint8_t* to, const uint8_t* start, Py_ssize_t size) noexcept nogil:
    """Copy bytes; most are few, for which two moves that overlap are faster than a call."""
    if size > 32:
        memcpy(to, start, size)
    elif size >= 16:
        memcpy(to, start, 16)
        memcpy(to + size - 16, start + size - 16, 16)
    elif size >= 8:
        memcpy(to, start, 8)
        memcpy(to + size - 8, start + size - 8, 8)
    elif size >= 4:
        memcpy(to, start, 4)
        memcpy(to + size - 4, start + size - 4, 4)
    elif size > 0:
        to[0] = start[0]
        to[size // 2] = start[size // 2]
        to[size - 1] = start[size - 1]


cdef _text_arrays(_Place* places, Py_ssize_t count):
    """Copy byte strings into a column; those without a start are null."""
    cdef array.array offsets = array.clone(_INTS, count + 1, False)
    cdef int* ends = offsets.data.as_ints
    cdef Py_ssize_t row
    cdef int64_t at = 0
    cdef bytes bits = None
    ends[0] = 0
    for row in range(count):
        at += places[row].size
        if at > _ALL_BYTES_MAX:
            raise InvalidArgument(
                f"a column must be at most {_ALL_BYTES_MAX} bytes: read fewer rows"
            )
        ends[row + 1] = <int>at
        if places[row].start == NULL:
            bits = _all_valid(count) if bits is None else bits
            (<uint8_t*>PyBytes_AS_STRING(bits))[row >> 3] &= ~(1 << (row & 7))
    cdef bytes data = PyBytes_FromStringAndSize(NULL, at)
    cdef uint8_t* target = <uint8_t*>PyBytes_AS_STRING(data)
    for row in range(count):
        _copy_bytes(target + ends[row], places[row].start, places[row].size)
    return Texts(bits, offsets, data)
