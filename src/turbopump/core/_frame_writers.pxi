# The bytes of sends, pulls and their responses, and ids; equals `reference.frame_writers` and `ids`.

import struct

from cpython.unicode cimport PyUnicode_DecodeASCII

VERSION = 409

cdef enum:
    JOINED_BYTES_MAX = 4096
    # The longest decimal form of a 64-bit number.
    NUMBER_BYTES = 20
    POSITION_DIGITS = 16
    # Headers up to this size are written on the stack.
    STACK_BYTES = 2048

cdef extern from *:
    """
    static const char hex_digits[] = "0123456789ABCDEF";

    static unsigned char *put_number(unsigned char *out, int64_t value) {
        unsigned char digits[20];
        int n = 0;
        uint64_t rest = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
        do digits[n++] = (unsigned char)('0' + rest % 10); while (rest /= 10);
        if (value < 0) *out++ = '-';
        while (n) *out++ = digits[--n];
        return out;
    }

    static unsigned char *put_hex(unsigned char *out, uint64_t value, int digits) {
        for (int at = digits - 1; at >= 0; at--, value >>= 4)
            out[at] = (unsigned char)hex_digits[value & 15];
        return out + digits;
    }

    static unsigned char *put_u32(unsigned char *out, uint32_t value) {
        out[0] = (unsigned char)(value >> 24);
        out[1] = (unsigned char)(value >> 16);
        out[2] = (unsigned char)(value >> 8);
        out[3] = (unsigned char)value;
        return out + 4;
    }

    /* Escapes UTF-8 for JSON, without the quotes; at most six bytes for one. */
    static unsigned char *put_escaped(unsigned char *out, const unsigned char *p, Py_ssize_t n) {
        for (const unsigned char *end = p + n; p < end; p++) {
            unsigned char byte = *p, letter = 0;
            if (byte >= 0x20 && byte != '"' && byte != '\\\\') { *out++ = byte; continue; }
            switch (byte) {
            case '"': case '\\\\': letter = byte; break;
            case '\\b': letter = 'b'; break;
            case '\\f': letter = 'f'; break;
            case '\\n': letter = 'n'; break;
            case '\\r': letter = 'r'; break;
            case '\\t': letter = 't'; break;
            }
            *out++ = '\\\\';
            if (letter) { *out++ = letter; continue; }
            memcpy(out, "u00", 3);
            out[3] = (unsigned char)("01"[byte >> 4]);
            out[4] = (unsigned char)("0123456789abcdef"[byte & 15]);
            out += 5;
        }
        return out;
    }
    """
    unsigned char* put_number(unsigned char* out, int64_t value) noexcept nogil
    unsigned char* put_hex(unsigned char* out, uint64_t value, int digits) noexcept nogil
    unsigned char* put_u32(unsigned char* out, uint32_t value) noexcept nogil
    unsigned char* put_escaped(unsigned char* out, const unsigned char* p, Py_ssize_t n) noexcept nogil


cdef inline unsigned char* _put(unsigned char* out, bytes piece) noexcept:
    memcpy(out, PyBytes_AS_STRING(piece), PyBytes_GET_SIZE(piece))
    return out + PyBytes_GET_SIZE(piece)


cdef inline unsigned char* _put_prefix(unsigned char* start, const unsigned char* end, Py_ssize_t body_bytes, uint32_t serialize) noexcept nogil:
    """Write the lengths of a header that begins 8 bytes after ``start``."""
    cdef uint32_t header_len = <uint32_t>(end - start - PREFIX_BYTES)
    put_u32(start, <uint32_t>(header_len + LENGTH_BYTES + body_bytes))
    return put_u32(start + LENGTH_BYTES, serialize << 24 | header_len)


cdef bytes _quoted(str text):
    """Return a string in JSON."""
    cdef bytes data = text.encode()
    cdef bytearray room = bytearray(6 * len(data) + 2)
    cdef unsigned char* start = <unsigned char*>PyByteArray_AS_STRING(room)
    cdef unsigned char* out = start
    out[0] = b'"'
    out = put_escaped(out + 1, <const unsigned char*>PyBytes_AS_STRING(data), len(data))
    out[0] = b'"'
    return bytes(room[: out + 1 - start])


cdef bytes _members(fields):
    """Return fields in JSON, without the braces and None."""
    return b",".join([_quoted(name) + b":" + _quoted(value) for name, value in fields if value is not None])


cdef bytes _tail(remark=None):
    """Return what follows the request id in a JSON header."""
    text = b"" if remark is None else b',"remark":' + _quoted(remark)
    return text + b',"serializeTypeCurrentRPC":"JSON","version":%d}' % VERSION


cdef bytes _binary_entries(fields):
    entries = []
    for name, value in fields:
        key, data = name.encode(), value.encode()
        entries += [len(key).to_bytes(2, "big"), key, len(data).to_bytes(4, "big"), data]
    return b"".join(entries)


cdef str _boolean_text(bint value):
    return "true" if value else "false"


# --- sends ----------------------------------------------------------------------------------------


@cython.final
cdef class SendTemplate:
    """The requests of one producer group, topic and broker with messages, or with batches."""

    cdef readonly int code
    cdef bytes _start, _end, _tail
    cdef Py_ssize_t _bound

    def __init__(
        self,
        str group not None,
        str topic not None,
        str broker,
        *,
        int32_t default_topic_queue_nums,
        bint is_batch=False,
        bint unit_mode=False,
        str default_topic not None="TBW102",
    ):
        self.code = 320 if is_batch else 310
        names = [("a", group), ("b", topic), ("c", default_topic), ("d", str(default_topic_queue_nums))]
        flags = [("j", "0"), ("k", _boolean_text(unit_mode)), ("m", _boolean_text(is_batch)), ("n", broker)]
        # All or nothing: pieces and bound have to fit each other, whatever raises.
        pieces = (
            b'{"code":%d,"extFields":{%b,"e":"' % (self.code, _members(names)),
            b'",%b},"flag":' % _members(flags),
            _tail(),
        )
        self._bound = PREFIX_BYTES + sum(map(len, pieces)) + 256
        self._start, self._end, self._tail = pieces

    def frame(
        self,
        int32_t opaque,
        int64_t queue_id,
        int64_t sys_flag,
        int64_t born_ms,
        int64_t flag,
        properties,
        int32_t frame_flag,
        body,
        Py_ssize_t frame_bytes_max,
    ):
        """Return a request in one piece, or in two if its body is long.

        ``properties`` as bytes must be UTF-8.
        """
        cdef unsigned char[STACK_BYTES] stack
        cdef unsigned char* start = stack
        cdef const unsigned char* props = NULL
        cdef Py_ssize_t props_len = 0, bound
        _take_properties(properties, &props, &props_len)
        if self._start is None:
            raise InvalidArgument("a template must be initialized")
        bound = self._bound + 6 * props_len
        if bound > STACK_BYTES:
            start = <unsigned char*>malloc(bound)
            if start == NULL:
                raise MemoryError
        cdef unsigned char* out = _put(start + PREFIX_BYTES, self._start)
        out = put_number(out, queue_id)
        memcpy(out, '","f":"', 7)
        out = put_number(out + 7, sys_flag)
        memcpy(out, '","g":"', 7)
        out = put_number(out + 7, born_ms)
        memcpy(out, '","h":"', 7)
        out = put_number(out + 7, flag)
        memcpy(out, '","i":"', 7)
        out = put_escaped(out + 7, props, props_len)
        out = put_number(_put(out, self._end), frame_flag)
        memcpy(out, ',"language":"PYTHON","opaque":', 30)
        out = _put(put_number(out + 30, opaque), self._tail)
        try:
            return _with_body(start, out, body, frame_bytes_max)
        finally:
            if start != stack:
                free(start)


cdef int _take_properties(properties, const unsigned char** p, Py_ssize_t* n) except -1:
    try:
        if type(properties) is str:
            p[0] = <const unsigned char*>PyUnicode_AsUTF8AndSize(properties, n)
            return 0
        p[0] = <const unsigned char*>PyBytes_AS_STRING(<bytes?>properties)
        n[0] = PyBytes_GET_SIZE(properties)
        if not c_is_utf8(p[0], n[0]):
            properties.decode()
    except UnicodeError as error:
        raise InvalidArgument(f"tags, keys and properties must be UTF-8 text: {error}") from error
    return 0


cdef list _with_body(unsigned char* start, unsigned char* end, body, Py_ssize_t frame_bytes_max):
    """Return a frame as its header, written from ``start`` on, and its body, in one piece if short."""
    cdef Py_ssize_t body_len = len(body), head_len = end - start
    cdef Py_ssize_t length = head_len - LENGTH_BYTES + body_len
    cdef Py_buffer view
    cdef bytes frame
    if length > frame_bytes_max:
        raise InvalidArgument(f"a frame must be at most {frame_bytes_max} bytes, got {length}")
    _put_prefix(start, end, body_len, JSON)
    if body_len > JOINED_BYTES_MAX:
        return [PyBytes_FromStringAndSize(<char*>start, head_len), body]
    frame = PyBytes_FromStringAndSize(NULL, head_len + body_len)
    memcpy(PyBytes_AS_STRING(frame), start, head_len)
    if type(body) is bytes:
        memcpy(PyBytes_AS_STRING(frame) + head_len, PyBytes_AS_STRING(body), body_len)
        return [frame]
    PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
    try:
        if view.len != body_len:
            raise InvalidArgument("a body must consist of bytes")
        memcpy(PyBytes_AS_STRING(frame) + head_len, view.buf, body_len)
    finally:
        PyBuffer_Release(&view)
    return [frame]


@cython.final
cdef class SendResponses:
    """The responses of one broker to sends that are stored.

    ``traits`` are the fields that all its responses have; ``ip`` and ``port`` are those that
    messages name as their store.
    """

    cdef bytes _host
    cdef bytes _json_start, _json_tail
    cdef bytes _binary_start, _binary_traits
    cdef Py_ssize_t _bound

    def __init__(self, traits, bytes ip not None, int32_t port):
        members = _members(traits.items())
        json = b'{"code":0,"extFields":{%b"msgId":"' % (members + b"," if members else b""), _tail()
        binary = (
            struct.pack(">hbh", 0, LANGUAGES.index("PYTHON"), VERSION),
            _binary_entries(traits.items()),
        )
        self._host = _host_digits(ip, port)
        self._bound = PREFIX_BYTES + max(sum(map(len, json)), sum(map(len, binary))) + 256
        self._json_start, self._json_tail = json
        self._binary_start, self._binary_traits = binary

    def frame(self, int32_t opaque, int64_t position, int32_t queue_id, int64_t queue_offset, int serialize=JSON):
        """Return the response to a request: where its message is stored."""
        return self._made(serialize, opaque, &position, 1, queue_id, queue_offset)

    def batch_frame(self, int32_t opaque, positions, int32_t queue_id, int64_t queue_offset, int serialize=JSON):
        """Return the response to a batch: where its messages are stored."""
        cdef Py_ssize_t count = 0
        cdef int64_t* found = _numbers(positions, &count)
        try:
            return self._made(serialize, opaque, found, count, queue_id, queue_offset)
        finally:
            free(found)

    def frames(self, requests, positions, queue_ids, queue_offsets):
        """Return the responses to many requests, one after the other; one-way ones get none.

        A request's position is a number, or a sequence for the messages of a batch.
        """
        cdef list answers = []
        cdef SendFrame request
        cdef int64_t position
        for request, at, queue_id, offset in zip(requests, positions, queue_ids, queue_offsets, strict=True):
            if request is None:
                raise TypeError("expected a request, got None")
            if request.flag & FLAG_ONEWAY:
                continue
            if isinstance(at, int):
                position = at
                answers.append(self._made(request.serialize, request.opaque, &position, 1, queue_id, offset))
            else:
                answers.append(self.batch_frame(request.opaque, at, queue_id, offset, request.serialize))
        return b"".join(answers)

    cdef bytes _made(self, int serialize, int32_t opaque, const int64_t* positions, Py_ssize_t count, int32_t queue_id, int64_t queue_offset):
        cdef unsigned char[STACK_BYTES] stack
        cdef unsigned char* start = stack
        cdef Py_ssize_t bound = self.bound(count)
        cdef bytes frame
        if bound > STACK_BYTES:
            start = <unsigned char*>malloc(bound)
            if start == NULL:
                raise MemoryError
        cdef unsigned char* end = self.put(start, serialize, opaque, positions, count, queue_id, queue_offset)
        try:
            return PyBytes_FromStringAndSize(<char*>start, end - start)
        finally:
            if start != stack:
                free(start)

    cdef Py_ssize_t bound(self, Py_ssize_t count) except -1:
        """How many bytes `put` writes at most for a number of positions."""
        if self._binary_traits is None:
            raise InvalidArgument("responses must be initialized")
        return self._bound + count * (PyBytes_GET_SIZE(self._host) + POSITION_DIGITS + 1)

    cdef unsigned char* put(self, unsigned char* start, int serialize, int32_t opaque, const int64_t* positions, Py_ssize_t count, int32_t queue_id, int64_t queue_offset) noexcept:
        """Write a response, for the encoder of blocks too; returns where it ends."""
        if serialize == BINARY:
            return self._put_binary(start, opaque, positions, count, queue_id, queue_offset)
        cdef unsigned char* out = _put(start + PREFIX_BYTES, self._json_start)
        out = self._put_ids(out, positions, count)
        memcpy(out, '","queueId":"', 13)
        out = put_number(out + 13, queue_id)
        memcpy(out, '","queueOffset":"', 17)
        out = put_number(out + 17, queue_offset)
        memcpy(out, '"},"flag":1,"language":"PYTHON","opaque":', 41)
        out = _put(put_number(out + 41, opaque), self._json_tail)
        _put_prefix(start, out, 0, JSON)
        return out

    cdef unsigned char* _put_binary(self, unsigned char* start, int32_t opaque, const int64_t* positions, Py_ssize_t count, int32_t queue_id, int64_t queue_offset) noexcept:
        cdef unsigned char* out = _put(start + PREFIX_BYTES, self._binary_start)
        cdef unsigned char* fields
        cdef unsigned char* value
        out = put_u32(put_u32(put_u32(out, opaque), FLAG_RESPONSE), 0)
        fields = out
        out = _put(out + 4, self._binary_traits)
        memcpy(out, "\0\x05msgId", 7)
        value = out + 7
        out = self._put_ids(value + 4, positions, count)
        put_u32(value, <uint32_t>(out - value - 4))
        memcpy(out, "\0\x07queueId", 9)
        out = _put_sized_number(out + 9, queue_id)
        memcpy(out, "\0\x0bqueueOffset", 13)
        out = _put_sized_number(out + 13, queue_offset)
        put_u32(fields, <uint32_t>(out - fields - 4))
        _put_prefix(start, out, 0, BINARY)
        return out

    cdef unsigned char* _put_ids(self, unsigned char* out, const int64_t* positions, Py_ssize_t count) noexcept:
        return _put_offset_ids(out, self._host, positions, count)


cdef unsigned char* _put_sized_number(unsigned char* out, int64_t number) noexcept nogil:
    cdef unsigned char* end = put_number(out + 4, number)
    put_u32(out, <uint32_t>(end - out - 4))
    return end


cdef int64_t* _numbers(values, Py_ssize_t* count) except NULL:
    """Return a sequence's numbers, to be freed."""
    cdef list given = list(values)
    cdef Py_ssize_t at
    count[0] = len(given)
    cdef int64_t* found = <int64_t*>malloc((count[0] + 1) * sizeof(int64_t))
    if found == NULL:
        raise MemoryError
    try:
        for at in range(count[0]):
            found[at] = given[at]
    except BaseException:
        free(found)
        raise
    return found


# --- pulls ----------------------------------------------------------------------------------------


@cython.final
cdef class PullRequests:
    """Requests for messages that are the same except for queue, offset and count."""

    cdef bytes _start, _end, _tail
    cdef Py_ssize_t _bound

    def __init__(
        self,
        str group not None,
        str topic not None,
        *,
        int32_t sys_flag,
        int64_t commit_offset,
        int64_t suspend_timeout_ms,
        str subscription,
        int64_t sub_version,
        str expression_type,
        bulk_pull=None,
        str broker=None,
    ):
        before = [("bname", broker), ("consumerGroup", group), ("topic", topic)]
        after = [
            ("sysFlag", str(sys_flag)),
            ("commitOffset", str(commit_offset)),
            ("suspendTimeoutMillis", str(suspend_timeout_ms)),
            ("subscription", subscription),
            ("subVersion", str(sub_version)),
            ("expressionType", expression_type),
            ("bulkPull", None if bulk_pull is None else _boolean_text(bulk_pull)),
        ]
        pieces = (
            b'{"code":11,"extFields":{%b,"queueId":"' % _members(before),
            b'",%b},"flag":0,"language":"PYTHON","opaque":' % _members(after),
            _tail(),
        )
        self._bound = PREFIX_BYTES + sum(map(len, pieces)) + 256
        self._start, self._end, self._tail = pieces

    def frame(self, int32_t opaque, int32_t queue_id, int64_t queue_offset, int32_t count_max):
        """Return a request for up to ``count_max`` messages from an offset."""
        if self._tail is None:
            raise InvalidArgument("requests must be initialized")
        cdef bytes room = PyBytes_FromStringAndSize(NULL, self._bound)
        cdef unsigned char* start = <unsigned char*>PyBytes_AS_STRING(room)
        cdef unsigned char* out = put_number(_put(start + PREFIX_BYTES, self._start), queue_id)
        memcpy(out, '","queueOffset":"', 17)
        out = put_number(out + 17, queue_offset)
        memcpy(out, '","maxMsgNums":"', 16)
        out = put_number(out + 16, count_max)
        out = _put(put_number(_put(out, self._end), opaque), self._tail)
        _put_prefix(start, out, 0, JSON)
        return PyBytes_FromStringAndSize(<char*>start, out - start)


@cython.final
cdef class PullResponses:
    """Responses to pulls, up to their bodies."""

    cdef bytes _json_start, _json_tail
    cdef bytes _binary_start, _binary_remark, _binary_broker
    cdef Py_ssize_t _bound

    def __init__(self, int code, int64_t broker_id, str remark):
        broker = [("suggestWhichBrokerId", str(broker_id))]
        text = (remark or "").encode()
        json = b'{"code":%d,"extFields":{%b,"nextBeginOffset":"' % (code, _members(broker)), _tail(remark)
        binary = (
            struct.pack(">hbh", code, LANGUAGES.index("PYTHON"), VERSION),
            len(text).to_bytes(4, "big") + text,
            _binary_entries(broker),
        )
        self._bound = PREFIX_BYTES + max(sum(map(len, json)), sum(map(len, binary))) + 256
        self._json_start, self._json_tail = json
        self._binary_start, self._binary_remark, self._binary_broker = binary

    def frame(
        self,
        int32_t opaque,
        int64_t next_offset,
        int64_t min_offset,
        int64_t max_offset,
        Py_ssize_t body_bytes=0,
        int serialize=JSON,
    ):
        """Return a response: the next offset, and the queue's minimum and maximum.

        ``body_bytes`` bytes of messages have to follow.
        """
        if self._binary_broker is None:
            raise InvalidArgument("responses must be initialized")
        cdef bytes room = PyBytes_FromStringAndSize(NULL, self._bound)
        cdef unsigned char* start = <unsigned char*>PyBytes_AS_STRING(room)
        cdef unsigned char* out
        if serialize == BINARY:
            out = self._put_binary(start + PREFIX_BYTES, opaque, next_offset, min_offset, max_offset)
        else:
            out = put_number(_put(start + PREFIX_BYTES, self._json_start), next_offset)
            memcpy(out, '","minOffset":"', 15)
            out = put_number(out + 15, min_offset)
            memcpy(out, '","maxOffset":"', 15)
            out = put_number(out + 15, max_offset)
            memcpy(out, '"},"flag":1,"language":"PYTHON","opaque":', 41)
            out = _put(put_number(out + 41, opaque), self._json_tail)
        _put_prefix(start, out, body_bytes, BINARY if serialize == BINARY else JSON)
        return PyBytes_FromStringAndSize(<char*>start, out - start)

    cdef unsigned char* _put_binary(self, unsigned char* out, int32_t opaque, int64_t next_offset, int64_t min_offset, int64_t max_offset) noexcept:
        cdef unsigned char* fields
        out = put_u32(put_u32(_put(out, self._binary_start), opaque), FLAG_RESPONSE)
        fields = _put(out, self._binary_remark)
        out = _put(fields + 4, self._binary_broker)
        memcpy(out, "\0\x0fnextBeginOffset", 17)
        out = _put_sized_number(out + 17, next_offset)
        memcpy(out, "\0\x09minOffset", 11)
        out = _put_sized_number(out + 11, min_offset)
        memcpy(out, "\0\x09maxOffset", 11)
        out = _put_sized_number(out + 11, max_offset)
        put_u32(fields, <uint32_t>(out - fields - 4))
        return out


# --- ids ------------------------------------------------------------------------------------------


cdef bytes _host_digits(bytes ip, int32_t port):
    cdef Py_ssize_t at, n = PyBytes_GET_SIZE(ip)
    cdef bytes digits = PyBytes_FromStringAndSize(NULL, 2 * n + 8)
    cdef unsigned char* out = <unsigned char*>PyBytes_AS_STRING(digits)
    for at in range(n):
        out = put_hex(out, <unsigned char>PyBytes_AS_STRING(ip)[at], 2)
    put_hex(out, <uint32_t>port, 8)
    return digits


cdef unsigned char* _put_offset_ids(unsigned char* out, bytes host, const int64_t* positions, Py_ssize_t count) noexcept:
    cdef Py_ssize_t at
    for at in range(count):
        if at:
            out[0] = b","
            out += 1
        out = put_hex(_put(out, host), <uint64_t>positions[at], POSITION_DIGITS)
    return out


def offset_id(bytes ip not None, int32_t port, int64_t offset):
    """Return the id that contains the address of a message's broker and its position."""
    return _offset_ids(_host_digits(ip, port), &offset, 1)


def offset_ids(bytes ip not None, int32_t port, offsets):
    """Return the ids of messages on one broker, separated by commas."""
    cdef Py_ssize_t count = 0
    cdef int64_t* found = _numbers(offsets, &count)
    try:
        return _offset_ids(_host_digits(ip, port), found, count)
    finally:
        free(found)


cdef str _offset_ids(bytes host, const int64_t* offsets, Py_ssize_t count):
    cdef bytes room = PyBytes_FromStringAndSize(NULL, count * (PyBytes_GET_SIZE(host) + POSITION_DIGITS + 1))
    cdef unsigned char* start = <unsigned char*>PyBytes_AS_STRING(room)
    cdef unsigned char* end = _put_offset_ids(start, host, offsets, count)
    return PyUnicode_DecodeASCII(<char*>start, end - start, NULL)


def unique_id_prefix(bytes maker not None, uint32_t elapsed_ms):
    """Return what the unique ids of one process and millisecond have in common."""
    return (maker + (<object>elapsed_ms).to_bytes(4, "big")).hex().upper()


def unique_id(str prefix not None, int64_t counter):
    """Return the unique id with the low 16 bits of a counter."""
    cdef unsigned char[4] digits
    put_hex(digits, counter & 0xFFFF, 4)
    return prefix + PyUnicode_DecodeASCII(<char*>digits, 4, NULL)


def unique_ids(str prefix not None, counters):
    return [unique_id(prefix, counter) for counter in counters]
