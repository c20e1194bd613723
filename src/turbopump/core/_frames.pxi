# Frames and their headers; equals `reference.frames` and `reference.headers`.

cimport cython
from cpython.bytearray cimport (
    PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_GET_SIZE, PyByteArray_Resize,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.memoryview cimport PyMemoryView_GET_BUFFER
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

from turbopump.errors import FrameError, InvalidArgument

FRAME_BYTES_MAX = 16 * 1024 * 1024
HEADER_BYTES_MAX = 1024 * 1024
LANGUAGES = (
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY",
    "OTHER", "HTTP", "GO", "PHP", "OMS", "RUST",
)

cdef enum:
    FLAG_RESPONSE = 0b01
    FLAG_ONEWAY = 0b10
    LENGTH_BYTES = 4
    PREFIX_BYTES = 8
    HEADER_MAX = 1024 * 1024
    LARGE_BYTES = 65536
    FIXED_BYTES = 17
    JSON = 0
    BINARY = 1
    # All that a header of the ordinary form may have.
    FIELDS_MAX = 15
    # A number, boolean or language is shorter, however it is escaped.
    ROOM_BYTES = 128

cdef int64_t I32_MAX = 0x7FFFFFFF


# --- types ----------------------------------------------------------------------------------------


cdef struct Text:
    # UTF-8 within a chunk, checked; if it contains JSON's escapes, it is ``dropped`` bytes shorter
    # without them.
    const unsigned char* p
    Py_ssize_t n
    Py_ssize_t dropped


@cython.no_gc
@cython.freelist(64)
cdef class Frame:
    """A frame whose header is not interpreted.

    ``position`` is where its header begins in the stream; errors in the header count from there.
    """

    # What the pointers of a frame point into: bytes, or a memoryview of a bytearray.
    cdef object _owner
    cdef const unsigned char* header_ptr
    cdef Py_ssize_t header_len
    cdef const unsigned char* body_ptr
    cdef Py_ssize_t body_len
    cdef readonly int64_t position
    cdef readonly int serialize

    @property
    def body_length(self):
        """The size of the body, without creating it."""
        return self.body_len

    @property
    def header(self):
        return PyBytes_FromStringAndSize(<char*>self.header_ptr, self.header_len)

    @property
    def body(self):
        """A copy, or a view of the chunk if the body is large."""
        cdef Py_ssize_t at
        if self.body_len < LARGE_BYTES:
            return PyBytes_FromStringAndSize(<char*>self.body_ptr, self.body_len)
        at = self.body_ptr - _start_of(self._owner)
        return memoryview(self._owner)[at : at + self.body_len]


cdef inline const unsigned char* _start_of(owner):
    if type(owner) is bytes:
        return <const unsigned char*>PyBytes_AS_STRING(owner)
    return <const unsigned char*>PyMemoryView_GET_BUFFER(owner).buf


@cython.no_gc
cdef class TypedFrame(Frame):
    """A frame whose header has the ordinary form; ``language`` is None if it is not known."""

    cdef readonly int32_t code
    cdef readonly int32_t flag
    cdef readonly int32_t opaque
    cdef readonly int32_t version
    cdef int _language
    cdef bint _has_remark
    cdef Text _remark

    @property
    def language(self):
        return None if self._language < 0 else self._language

    @property
    def remark(self):
        return _string(&self._remark) if self._has_remark else None


@cython.final
@cython.no_gc
cdef class SendFrame(TypedFrame):
    """A request with a message or a batch (codes 310 and 320)."""

    cdef Text _producer_group, _topic, _default_topic, _broker_name
    cdef bytes _properties
    cdef const unsigned char* props_ptr
    cdef Py_ssize_t props_len
    cdef readonly int64_t born_timestamp
    cdef readonly int32_t default_topic_queue_nums
    cdef readonly int32_t queue_id
    cdef readonly int32_t sys_flag
    cdef readonly int32_t message_flag
    cdef readonly int32_t reconsume_times
    cdef int32_t _max_reconsume_times
    cdef bint _has_max_reconsume_times
    cdef readonly bint unit_mode
    cdef readonly bint batch

    @property
    def producer_group(self):
        return _string(&self._producer_group)

    @property
    def topic(self):
        return _string(&self._topic)

    @property
    def default_topic(self):
        return _string(&self._default_topic)

    @property
    def broker_name(self):
        return _optional_string(&self._broker_name)

    @property
    def properties(self):
        if self._properties is not None:
            return self._properties
        return PyBytes_FromStringAndSize(<char*>self.props_ptr, self.props_len)

    @property
    def max_reconsume_times(self):
        return self._max_reconsume_times if self._has_max_reconsume_times else None


@cython.final
@cython.no_gc
cdef class PullFrame(TypedFrame):
    """A request for messages (code 11)."""

    cdef Text _consumer_group, _topic, _subscription, _expression_type, _broker_name
    cdef readonly int64_t queue_offset
    cdef readonly int64_t commit_offset
    cdef readonly int64_t suspend_timeout_millis
    cdef readonly int64_t sub_version
    cdef readonly int32_t queue_id
    cdef readonly int32_t max_msg_nums
    cdef readonly int32_t sys_flag
    cdef int _bulk_pull

    @property
    def consumer_group(self):
        return _string(&self._consumer_group)

    @property
    def topic(self):
        return _string(&self._topic)

    @property
    def subscription(self):
        return _optional_string(&self._subscription)

    @property
    def expression_type(self):
        return _optional_string(&self._expression_type)

    @property
    def broker_name(self):
        return _optional_string(&self._broker_name)

    @property
    def bulk_pull(self):
        return None if self._bulk_pull < 0 else self._bulk_pull == 1


@cython.final
@cython.no_gc
cdef class SendResponseFrame(TypedFrame):
    """The answer to a send whose message is stored."""

    cdef Text _msg_id, _transaction_id, _region
    cdef readonly int64_t queue_offset
    cdef readonly int32_t queue_id
    cdef int _trace_on

    @property
    def msg_id(self):
        return _string(&self._msg_id)

    @property
    def transaction_id(self):
        return _optional_string(&self._transaction_id)

    @property
    def region(self):
        return _optional_string(&self._region)

    @property
    def trace_on(self):
        return None if self._trace_on < 0 else self._trace_on == 1


@cython.final
@cython.no_gc
cdef class PullResponseFrame(TypedFrame):
    """The answer to a pull: the next offset, and the queue's minimum and maximum offset."""

    cdef readonly int64_t suggest_which_broker_id
    cdef readonly int64_t next_begin_offset
    cdef readonly int64_t min_offset
    cdef readonly int64_t max_offset


# --- texts ----------------------------------------------------------------------------------------

cdef enum:
    TEXTS = 512
    TEXT_BYTES_MAX = 64

# Names of topics and groups come again and again: a string that exists knows its hash already.
cdef list _texts = [""] * TEXTS


cdef str _string(Text* text):
    """Return a text as a string."""
    cdef bytes plain
    if text.dropped:
        plain = _unescaped(text)
        return plain.decode()
    if text.n == 0:
        return ""
    if text.n <= TEXT_BYTES_MAX:
        return _known_string(text.p, text.n)
    return PyUnicode_DecodeUTF8(<char*>text.p, text.n, NULL)


cdef inline object _optional_string(Text* text):
    return None if text.p == NULL else _string(text)


cdef str _known_string(const unsigned char* p, Py_ssize_t n):
    cdef uint64_t hashed = <uint64_t>n * 0x9E3779B97F4A7C15u, word
    cdef Py_ssize_t at = 0
    cdef Py_ssize_t known_bytes = 0
    cdef const char* known
    while n - at >= 8:
        memcpy(&word, p + at, 8)
        hashed = (hashed ^ word) * 0xFF51AFD7ED558CCDu
        hashed ^= hashed >> 32
        at += 8
    word = 0
    if at < n:
        memcpy(&word, p + at, n - at)
        hashed = (hashed ^ word) * 0xFF51AFD7ED558CCDu
        hashed ^= hashed >> 32
    cdef Py_ssize_t place = <Py_ssize_t>(hashed % TEXTS)
    cdef str text = <str>_texts[place]
    # The UTF-8 form is kept within the string; that of ASCII is the string itself.
    known = PyUnicode_AsUTF8AndSize(text, &known_bytes)
    if known_bytes == n and memcmp(known, p, n) == 0:
        return text
    text = PyUnicode_DecodeUTF8(<char*>p, n, NULL)
    _texts[place] = text
    return text


cdef bytes _unescaped(Text* text):
    cdef bytes plain = PyBytes_FromStringAndSize(NULL, text.n - text.dropped)
    unescape(text.p, text.n, <unsigned char*>PyBytes_AS_STRING(plain))
    return plain


cdef extern from *:
    """
    static uint32_t hex_value(const unsigned char *p) {
        uint32_t value = 0;
        for (int at = 0; at < 4; at++)
            value = value << 4 | (p[at] <= '9' ? p[at] - '0' : (p[at] | 32) - 'a' + 10);
        return value;
    }

    /* How many of 8 bytes come before the first one that may end a string's plain part; 8 if none. */
    static inline int plain_bytes(const unsigned char *p) {
        const uint64_t ones = 0x0101010101010101u, highs = 0x8080808080808080u;
        uint64_t word, quotes, slashes, found;
        memcpy(&word, p, 8);
        quotes = word ^ ones * '"';
        slashes = word ^ ones * '\\\\';
        found = ((quotes - ones) | (slashes - ones) | (word - ones * 0x20) | word) & highs;
        if (!found) return 8;
    #if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        /* A borrow marks only bytes after one that is marked rightly. */
        return __builtin_ctzll(found) >> 3;
    #else
        return 0;
    #endif
    }

    /* A JSON string from p, after its opening quote: returns where it continues after the closing
       one, NULL if it is not of the ordinary form; and by how much its escapes shorten it. */
    static const unsigned char *json_string(
        const unsigned char *p, const unsigned char *end, Py_ssize_t *dropped
    ) {
        const unsigned char *start = p;
        int is_ascii = 1;
        *dropped = 0;
        for (;;) {
            if (end - p >= 8) {
                int plain = plain_bytes(p);
                p += plain;
                if (plain == 8) continue;
            } else if (p == end) {
                return NULL;
            }
            unsigned char byte = *p;
            if (byte == '"') break;
            if (byte == '\\\\') {
                if (end - p < 2) return NULL;
                switch (p[1]) {
                case '"': case '\\\\': case '/': case 'b': case 'f': case 'n': case 'r': case 't':
                    *dropped += 1;
                    p += 2;
                    continue;
                case 'u':
                    break;
                default:
                    return NULL;
                }
                if (end - p < 6) return NULL;
                for (int at = 2; at < 6; at++) {
                    unsigned char digit = p[at], letter = digit | 32;
                    if (!((digit >= '0' && digit <= '9') || (letter >= 'a' && letter <= 'f')))
                        return NULL;
                }
                uint32_t point = hex_value(p + 2);
                /* A surrogate. */
                if (point >> 11 == 0x1B) return NULL;
                *dropped += point < 0x80 ? 5 : point < 0x800 ? 4 : 3;
                p += 6;
                continue;
            }
            if (byte < 0x20) return NULL;
            if (byte >= 0x80) is_ascii = 0;
            p++;
        }
        if (!is_ascii && !utf8_is_valid(start, (size_t)(p - start))) return NULL;
        return p + 1;
    }

    /* Writes a string that `json_string` has checked. */
    static void unescape(const unsigned char *p, Py_ssize_t n, unsigned char *out) {
        const unsigned char *end = p + n;
        while (p < end) {
            if (*p != '\\\\') {
                *out++ = *p++;
                continue;
            }
            if (p[1] != 'u') {
                switch (p[1]) {
                case 'b': *out++ = '\\b'; break;
                case 'f': *out++ = '\\f'; break;
                case 'n': *out++ = '\\n'; break;
                case 'r': *out++ = '\\r'; break;
                case 't': *out++ = '\\t'; break;
                default: *out++ = p[1];
                }
                p += 2;
                continue;
            }
            uint32_t point = hex_value(p + 2);
            if (point < 0x80) {
                *out++ = (unsigned char)point;
            } else if (point < 0x800) {
                *out++ = (unsigned char)(0xC0 | point >> 6);
                *out++ = (unsigned char)(0x80 | (point & 0x3F));
            } else {
                *out++ = (unsigned char)(0xE0 | point >> 12);
                *out++ = (unsigned char)(0x80 | (point >> 6 & 0x3F));
                *out++ = (unsigned char)(0x80 | (point & 0x3F));
            }
            p += 6;
        }
    }

    static inline uint32_t load_u32(const unsigned char *p) {
        return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
    }
    """
    const unsigned char* json_string(const unsigned char* p, const unsigned char* end, Py_ssize_t* dropped) noexcept nogil
    void unescape(const unsigned char* p, Py_ssize_t n, unsigned char* out) noexcept nogil
    uint32_t load_u32(const unsigned char* p) noexcept nogil


# --- headers --------------------------------------------------------------------------------------


cdef struct Header:
    int32_t code
    int32_t flag
    int32_t opaque
    int32_t version
    int language
    bint has_remark
    Text remark
    int count
    Text names[FIELDS_MAX]
    Text values[FIELDS_MAX]


cdef inline bint _is(Text* text, const char* literal, Py_ssize_t n) noexcept nogil:
    return text.n == n and memcmp(text.p, literal, n) == 0


cdef bint _make_plain(Text* text, unsigned char* room) noexcept nogil:
    """Unescape a short text into ``room``; False if it is long."""
    cdef Py_ssize_t n
    if text.dropped:
        if text.n > ROOM_BYTES:
            return False
        n = text.n - text.dropped
        unescape(text.p, text.n, room)
        text.p, text.n, text.dropped = room, n, 0
    return True


cdef bint _digits_value(const unsigned char* p, Py_ssize_t n, int64_t most, int64_t* value) noexcept nogil:
    """Read a number in its shortest form, at least ``-most - 1`` and at most ``most``."""
    cdef uint64_t total = 0, limit
    cdef bint is_negative = n > 0 and p[0] == 45
    cdef Py_ssize_t at
    if is_negative:
        p += 1
        n -= 1
    if not 1 <= n <= 19 or (p[0] == 48 and (n > 1 or is_negative)):
        return False
    for at in range(n):
        if not 48 <= p[at] <= 57:
            return False
        total = total * 10 + (p[at] - 48)
    limit = <uint64_t>most + is_negative
    if total > limit:
        return False
    value[0] = <int64_t>(0 - total) if is_negative else <int64_t>total
    return True


cdef bint _integer(Text* given, int64_t most, int64_t* value) noexcept nogil:
    cdef unsigned char[ROOM_BYTES] room
    cdef Text text = given[0]
    return _make_plain(&text, room) and _digits_value(text.p, text.n, most, value)


cdef bint _i32(Text* text, int32_t* value) noexcept nogil:
    cdef int64_t wide = 0
    if text.p == NULL or not _integer(text, I32_MAX, &wide):
        return False
    value[0] = <int32_t>wide
    return True


cdef bint _i64(Text* text, int64_t* value) noexcept nogil:
    return text.p != NULL and _integer(text, 0x7FFFFFFFFFFFFFFF, value)


cdef bint _boolean(Text* given, int* value) noexcept nogil:
    """Read true, false or nothing, which is -1."""
    cdef unsigned char[ROOM_BYTES] room
    cdef Text text = given[0]
    value[0] = -1
    if given.p == NULL:
        return True
    if not _make_plain(&text, room):
        return False
    if _is(&text, "true", 4):
        value[0] = 1
    elif _is(&text, "false", 5):
        value[0] = 0
    return value[0] >= 0


cdef int _language_number(Text* given) noexcept nogil:
    """The number of a language; -1 if it is none."""
    cdef unsigned char[ROOM_BYTES] room
    cdef Text text = given[0]
    if not _make_plain(&text, room) or text.n < 2:
        return -1
    if text.p[0] == b"J":
        return 0 if _is(&text, "JAVA", 4) else -1
    if _is(&text, "PYTHON", 6):
        return 3
    if _is(&text, "CPP", 3):
        return 1
    if _is(&text, "GO", 2):
        return 9
    if _is(&text, "OTHER", 5):
        return 7
    if _is(&text, "DOTNET", 6):
        return 2
    if _is(&text, "DELPHI", 6):
        return 4
    if _is(&text, "ERLANG", 6):
        return 5
    if _is(&text, "RUBY", 4):
        return 6
    if _is(&text, "HTTP", 4):
        return 8
    if _is(&text, "PHP", 3):
        return 10
    if _is(&text, "OMS", 3):
        return 11
    return 12 if _is(&text, "RUST", 4) else -1


cdef inline bint _is_request_read(int32_t code) noexcept nogil:
    return code == 310 or code == 320 or code == 11


cdef const unsigned char* _text_at(const unsigned char* p, const unsigned char* end, Text* text) noexcept nogil:
    """Read a JSON string; returns where it ends, NULL if its form is unusual."""
    cdef const unsigned char* after
    if p >= end or p[0] != b'"':
        return NULL
    text.p = p + 1
    after = json_string(p + 1, end, &text.dropped)
    if after != NULL:
        text.n = after - 1 - text.p
    return after


cdef const unsigned char* _fields_at(const unsigned char* p, const unsigned char* end, Header* header) noexcept nogil:
    """Read the fields after their opening brace."""
    if p < end and p[0] == b"}":
        return p + 1
    while True:
        if header.count == FIELDS_MAX:
            return NULL
        p = _text_at(p, end, &header.names[header.count])
        if p == NULL or header.names[header.count].dropped or p >= end or p[0] != b":":
            return NULL
        p = _text_at(p + 1, end, &header.values[header.count])
        if p == NULL or p >= end:
            return NULL
        header.count += 1
        if p[0] == b"}":
            return p + 1
        if p[0] != b",":
            return NULL
        p += 1


cdef const unsigned char* _number_at(const unsigned char* p, const unsigned char* end, int32_t* value) noexcept nogil:
    cdef const unsigned char* start = p
    cdef int64_t wide = 0
    while p < end and (48 <= p[0] <= 57 or p[0] == 45):
        p += 1
    if not _digits_value(start, p - start, I32_MAX, &wide):
        return NULL
    value[0] = <int32_t>wide
    return p


cdef enum:
    HAS_CODE = 1
    HAS_FLAG = 2
    HAS_LANGUAGE = 4
    HAS_OPAQUE = 8
    HAS_REMARK = 16
    HAS_SERIALIZE = 32
    HAS_VERSION = 64
    HAS_FIELDS = 128


cdef bint _read_json(const unsigned char* p, const unsigned char* end, Header* header, bint responses) noexcept nogil:
    cdef Text name, text
    cdef unsigned char[ROOM_BYTES] room
    cdef int found = 0, member
    if p >= end or p[0] != b"{":
        return False
    while True:
        p = _text_at(p + 1, end, &name)
        if p == NULL or name.dropped or p >= end or p[0] != b":":
            return False
        p += 1
        if _is(&name, "code", 4):
            member = HAS_CODE
            p = _number_at(p, end, &header.code)
            if not responses and not _is_request_read(header.code):
                # Most frames that are not read are known here.
                return False
        elif _is(&name, "extFields", 9):
            member = HAS_FIELDS
            if p >= end or p[0] != b"{":
                return False
            p = _fields_at(p + 1, end, header)
        elif _is(&name, "flag", 4):
            member = HAS_FLAG
            p = _number_at(p, end, &header.flag)
        elif _is(&name, "language", 8):
            member = HAS_LANGUAGE
            p = _text_at(p, end, &text)
            if p != NULL:
                header.language = _language_number(&text)
                if header.language < 0:
                    return False
        elif _is(&name, "opaque", 6):
            member = HAS_OPAQUE
            p = _number_at(p, end, &header.opaque)
        elif _is(&name, "remark", 6):
            member = HAS_REMARK
            header.has_remark = True
            p = _text_at(p, end, &header.remark)
        elif _is(&name, "serializeTypeCurrentRPC", 23):
            member = HAS_SERIALIZE
            p = _text_at(p, end, &text)
            if p != NULL and not (_make_plain(&text, room) and _is(&text, "JSON", 4)):
                return False
        elif _is(&name, "version", 7):
            member = HAS_VERSION
            p = _number_at(p, end, &header.version)
        else:
            return False
        if p == NULL or p >= end or found & member:
            return False
        found |= member
        if p[0] == b"}":
            break
        if p[0] != b",":
            return False
    p += 1
    while p < end:
        if p[0] != b" " and p[0] != b"\n" and p[0] != b"\r" and p[0] != b"\t":
            return False
        p += 1
    return found & HAS_CODE


cdef const unsigned char* _sized_at(const unsigned char* p, const unsigned char* end, int length_bytes, Text* text) noexcept nogil:
    """Read a text of the binary form; returns where it ends, NULL if it is not whole or not UTF-8."""
    cdef int64_t length
    if end - p < length_bytes:
        return NULL
    if length_bytes == 4:
        length = <int32_t>load_u32(p)
    else:
        length = <int16_t>(<uint32_t>p[0] << 8 | p[1])
    p += length_bytes
    if not 0 <= length <= end - p or not c_is_utf8(p, length):
        return NULL
    text.p, text.n, text.dropped = p, length, 0
    return p + length


cdef bint _read_binary(const unsigned char* p, const unsigned char* end, Header* header) noexcept nogil:
    if end - p < FIXED_BYTES:
        return False
    header.code = <int16_t>(<uint32_t>p[0] << 8 | p[1])
    header.language = p[2] if p[2] <= 12 else -1
    header.version = <int16_t>(<uint32_t>p[3] << 8 | p[4])
    header.opaque = <int32_t>load_u32(p + 5)
    header.flag = <int32_t>load_u32(p + 9)
    p = _sized_at(p + 13, end, 4, &header.remark)
    if p == NULL or end - p < 4 or <int32_t>load_u32(p) != end - p - 4:
        return False
    header.has_remark = header.remark.n > 0
    p += 4
    while p < end:
        if header.count == FIELDS_MAX:
            return False
        p = _sized_at(p, end, 2, &header.names[header.count])
        if p == NULL or not header.names[header.count].n:
            return False
        p = _sized_at(p, end, 4, &header.values[header.count])
        if p == NULL or not header.values[header.count].n:
            return False
        header.count += 1
    return True


# --- typed frames ---------------------------------------------------------------------------------

cdef enum:
    GROUP
    TOPIC
    QUEUE_ID
    QUEUE_OFFSET
    MAX_MSG_NUMS
    SYS_FLAG
    COMMIT_OFFSET
    SUSPEND_TIMEOUT
    SUBSCRIPTION
    SUB_VERSION
    EXPRESSION_TYPE
    BULK_PULL
    BROKER_NAME
    IGNORED
    PLACES = 15


cdef inline int _send_place(Text* name) noexcept nogil:
    if name.n == 1 and 97 <= name.p[0] <= 110:
        return name.p[0] - 97
    return 14 if _is(name, "ReqT", 4) else -1


cdef int _pull_place(Text* name) noexcept nogil:
    if name.n == 4:
        return IGNORED if memcmp(name.p, "ReqT", 4) == 0 else -1
    if name.n == 5:
        if memcmp(name.p, "topic", 5) == 0:
            return TOPIC
        return BROKER_NAME if memcmp(name.p, "bname", 5) == 0 else -1
    if name.n == 7:
        if memcmp(name.p, "queueId", 7) == 0:
            return QUEUE_ID
        return SYS_FLAG if memcmp(name.p, "sysFlag", 7) == 0 else -1
    if name.n == 8:
        return BULK_PULL if memcmp(name.p, "bulkPull", 8) == 0 else -1
    if name.n == 10:
        if memcmp(name.p, "maxMsgNums", 10) == 0:
            return MAX_MSG_NUMS
        return SUB_VERSION if memcmp(name.p, "subVersion", 10) == 0 else -1
    if _is(name, "queueOffset", 11):
        return QUEUE_OFFSET
    if _is(name, "subscription", 12):
        return SUBSCRIPTION
    if name.n == 13:
        return GROUP if memcmp(name.p, "consumerGroup", 13) == 0 else -1
    if _is(name, "commitOffset", 12):
        return COMMIT_OFFSET
    if _is(name, "expressionType", 14):
        return EXPRESSION_TYPE
    return SUSPEND_TIMEOUT if _is(name, "suspendTimeoutMillis", 20) else -1


cdef int _sent_place(Text* name) noexcept nogil:
    if _is(name, "msgId", 5):
        return 0
    if _is(name, "queueId", 7):
        return 1
    if _is(name, "queueOffset", 11):
        return 2
    if _is(name, "transactionId", 13):
        return 3
    if _is(name, "MSG_REGION", 10):
        return 4
    return 5 if _is(name, "TRACE_ON", 8) else -1


cdef int _pulled_place(Text* name) noexcept nogil:
    if _is(name, "suggestWhichBrokerId", 20):
        return 0
    if _is(name, "nextBeginOffset", 15):
        return 1
    if _is(name, "minOffset", 9):
        return 2
    return 3 if _is(name, "maxOffset", 9) else -1


ctypedef int (*Placing)(Text*) noexcept nogil


cdef bint _place(Header* header, Text* places, Placing place_of) noexcept nogil:
    """Put each field into its place; False if one is unknown or occurs twice."""
    cdef int at, place
    for at in range(PLACES):
        places[at].p = NULL
        places[at].n = 0
        places[at].dropped = 0
    for at in range(header.count):
        place = place_of(&header.names[at])
        if place < 0 or places[place].p != NULL:
            return False
        places[place] = header.values[at]
    return True


cdef Frame _typed(Header* header, bint requests, bint responses):
    """Return a frame with the fields of a header; None if they are unusual."""
    if header.flag & FLAG_RESPONSE:
        if not responses:
            return None
        if _has_message_id(header):
            return _send_response(header)
        return _pull_response(header)
    if not requests:
        return None
    if header.code == 310 or header.code == 320:
        return _send(header)
    return _pull(header) if header.code == 11 else None


cdef bint _has_message_id(Header* header) noexcept nogil:
    cdef int at
    for at in range(header.count):
        if _is(&header.names[at], "msgId", 5):
            return True
    return False


cdef inline void _take_header(TypedFrame frame, Header* header):
    frame.code = header.code
    frame.flag = header.flag
    frame.opaque = header.opaque
    frame.version = header.version
    frame._language = header.language
    frame._has_remark = header.has_remark
    if header.has_remark:
        frame._remark = header.remark


cdef Frame _send(Header* header):
    cdef Text[PLACES] field
    cdef int unit_mode = 0, batch = 0
    cdef int64_t born = 0
    cdef int32_t queues = 0, queue_id = 0, sys_flag = 0, flag = 0, times = 0, most = 0
    cdef SendFrame frame
    if not _place(header, field, _send_place):
        return None
    if field[0].p == NULL or field[1].p == NULL or field[2].p == NULL:
        return None
    if not (_i32(&field[3], &queues) and _i32(&field[4], &queue_id) and _i32(&field[5], &sys_flag)):
        return None
    if not (_i64(&field[6], &born) and _i32(&field[7], &flag)):
        return None
    if field[9].p != NULL and not _i32(&field[9], &times):
        return None
    if field[11].p != NULL and not _i32(&field[11], &most):
        return None
    if not (_boolean(&field[10], &unit_mode) and _boolean(&field[12], &batch)):
        return None
    frame = SendFrame.__new__(SendFrame)
    _take_header(frame, header)
    frame._producer_group, frame._topic, frame._default_topic = field[0], field[1], field[2]
    frame._broker_name = field[13]
    frame.default_topic_queue_nums, frame.queue_id, frame.sys_flag = queues, queue_id, sys_flag
    frame.born_timestamp, frame.message_flag, frame.reconsume_times = born, flag, times
    frame.unit_mode, frame.batch = unit_mode == 1, batch == 1
    frame._max_reconsume_times, frame._has_max_reconsume_times = most, field[11].p != NULL
    if field[8].dropped:
        frame._properties = _unescaped(&field[8])
        frame.props_ptr = <const unsigned char*>PyBytes_AS_STRING(frame._properties)
        frame.props_len = PyBytes_GET_SIZE(frame._properties)
    else:
        frame.props_ptr, frame.props_len = field[8].p, field[8].n
    return frame


cdef Frame _pull(Header* header):
    cdef Text[PLACES] field
    cdef int64_t offset = 0, commit = 0, timeout = 0, version = 0
    cdef int32_t queue_id = 0, count = 0, sys_flag = 0
    cdef int bulk = 0
    cdef PullFrame frame
    if not _place(header, field, _pull_place):
        return None
    if field[GROUP].p == NULL or field[TOPIC].p == NULL:
        return None
    if not (
        _i32(&field[QUEUE_ID], &queue_id)
        and _i64(&field[QUEUE_OFFSET], &offset)
        and _i32(&field[MAX_MSG_NUMS], &count)
        and _i32(&field[SYS_FLAG], &sys_flag)
        and _i64(&field[COMMIT_OFFSET], &commit)
        and _i64(&field[SUSPEND_TIMEOUT], &timeout)
        and _i64(&field[SUB_VERSION], &version)
        and _boolean(&field[BULK_PULL], &bulk)
    ):
        return None
    frame = PullFrame.__new__(PullFrame)
    _take_header(frame, header)
    frame._consumer_group, frame._topic = field[GROUP], field[TOPIC]
    frame._subscription, frame._expression_type = field[SUBSCRIPTION], field[EXPRESSION_TYPE]
    frame._broker_name = field[BROKER_NAME]
    frame.queue_offset, frame.commit_offset, frame.suspend_timeout_millis = offset, commit, timeout
    frame.sub_version, frame.queue_id, frame.max_msg_nums = version, queue_id, count
    frame.sys_flag, frame._bulk_pull = sys_flag, bulk
    return frame


cdef Frame _send_response(Header* header):
    cdef Text[PLACES] field
    cdef int64_t offset = 0
    cdef int32_t queue_id = 0
    cdef int trace_on = 0
    cdef SendResponseFrame frame
    if not _place(header, field, _sent_place) or field[0].p == NULL:
        return None
    if not (_i32(&field[1], &queue_id) and _i64(&field[2], &offset) and _boolean(&field[5], &trace_on)):
        return None
    frame = SendResponseFrame.__new__(SendResponseFrame)
    _take_header(frame, header)
    frame._msg_id, frame._transaction_id, frame._region = field[0], field[3], field[4]
    frame.queue_id, frame.queue_offset, frame._trace_on = queue_id, offset, trace_on
    return frame


cdef Frame _pull_response(Header* header):
    cdef Text[PLACES] field
    cdef int64_t broker_id = 0, following = 0, lowest = 0, highest = 0
    cdef PullResponseFrame frame
    if not _place(header, field, _pulled_place):
        return None
    if not (
        _i64(&field[0], &broker_id)
        and _i64(&field[1], &following)
        and _i64(&field[2], &lowest)
        and _i64(&field[3], &highest)
    ):
        return None
    frame = PullResponseFrame.__new__(PullResponseFrame)
    _take_header(frame, header)
    frame.suggest_which_broker_id, frame.next_begin_offset = broker_id, following
    frame.min_offset, frame.max_offset = lowest, highest
    return frame


# --- the stream -----------------------------------------------------------------------------------


@cython.final
cdef class FrameDecoder:
    """Splits a byte stream into frames, however it is chunked.

    ``typed_requests`` and ``typed_responses`` say whose headers are read; all other frames, and
    those with a header of an unusual form, are plain ones. Holds at most one frame and the last
    chunk. After an error the stream cannot be followed further, and every later call raises the
    same error.
    """

    cdef readonly int64_t frame_bytes_max
    cdef public bint typed_requests
    cdef public bint typed_responses
    cdef bytearray _pending
    cdef Py_ssize_t _missing
    cdef int64_t _consumed
    cdef object _error
    # What is left of the chunk being read.
    cdef Py_ssize_t _left

    def __init__(self, frame_bytes_max=FRAME_BYTES_MAX, *, bint typed_requests=False, bint typed_responses=False):
        self.frame_bytes_max = frame_bytes_max
        self.typed_requests = typed_requests
        self.typed_responses = typed_responses
        self.clear()

    def __cinit__(self):
        self._pending = bytearray()

    @property
    def pending_bytes(self):
        """Bytes received of an incomplete frame."""
        return PyByteArray_GET_SIZE(self._pending)

    @property
    def held_bytes(self):
        """Bytes received of frames that are incomplete or not taken yet."""
        return PyByteArray_GET_SIZE(self._pending) + self._left

    def clear(self):
        """Free all buffers; the decoder cannot be used afterwards."""
        self._pending = bytearray()
        self._left = 0

    def feed(self, bytes chunk not None):
        """Return an iterator of the frames that the chunk completes; exhaust it before the next.

        Errors count their position from the start of the stream.
        """
        cdef _Frames frames = _Frames.__new__(_Frames)
        frames._decoder = self
        frames._chunk = chunk
        return frames

    cdef Frame _cut(self, owner, const unsigned char* p, Py_ssize_t at, Py_ssize_t end):
        """Return the frame between two positions of a chunk."""
        cdef uint32_t mark = load_u32(p + at + LENGTH_BYTES)
        cdef Py_ssize_t header_at = at + PREFIX_BYTES
        cdef Py_ssize_t header_len = mark & 0xFFFFFF
        cdef Py_ssize_t header_end = header_at + header_len
        cdef int serialize = mark >> 24
        cdef Frame frame = None
        cdef Header header
        if header_end > end or header_len > HEADER_MAX:
            raise _wrong_header(at + self._consumed, header_len, end - at, header_end > end)
        if (self.typed_requests or self.typed_responses) and serialize <= BINARY:
            header.code = header.flag = header.opaque = header.version = 0
            header.language = -1
            header.has_remark = False
            header.count = 0
            if (
                _read_json(p + header_at, p + header_end, &header, self.typed_responses)
                if serialize == JSON
                else _read_binary(p + header_at, p + header_end, &header)
            ):
                frame = _typed(&header, self.typed_requests, self.typed_responses)
        if frame is None:
            frame = Frame.__new__(Frame)
        frame._owner = owner
        frame.serialize = serialize
        frame.position = self._consumed + header_at
        frame.header_ptr = p + header_at
        frame.header_len = header_len
        frame.body_ptr = p + header_end
        frame.body_len = end - header_end
        return frame


cdef _wrong_header(int64_t at, Py_ssize_t header_len, Py_ssize_t frame_bytes, bint is_beyond):
    if is_beyond:
        wrong = f"header of {header_len} bytes in a frame of {frame_bytes - LENGTH_BYTES}"
    else:
        wrong = f"header must be at most {HEADER_MAX} bytes, got {header_len}"
    return FrameError(wrong, at + LENGTH_BYTES)


@cython.final
cdef class _Frames:
    """The frames of one chunk; each is cut when it is asked for."""

    cdef FrameDecoder _decoder
    cdef bytes _chunk
    cdef Py_ssize_t _at
    cdef bint _has_begun

    def __iter__(self):
        return self

    def __next__(self):
        cdef FrameDecoder decoder = self._decoder
        cdef Frame frame
        if decoder is None:
            raise StopIteration
        try:
            if not self._has_begun:
                self._has_begun = True
                frame = self._begin(decoder)
                if frame is not None:
                    return frame
                if self._decoder is None:
                    raise StopIteration
            return self._next(decoder)
        except FrameError as error:
            self._decoder = None
            decoder._error = error
            decoder._left = 0
            raise

    cdef Frame _next(self, FrameDecoder decoder):
        cdef const unsigned char* p = <const unsigned char*>PyBytes_AS_STRING(self._chunk)
        cdef Py_ssize_t end = PyBytes_GET_SIZE(self._chunk), at = self._at, frame_end
        cdef int32_t length = 0
        cdef Frame frame
        if end - at >= LENGTH_BYTES:
            length = <int32_t>load_u32(p + at)
            if not LENGTH_BYTES <= length <= decoder.frame_bytes_max:
                raise FrameError(
                    f"a frame must be 4 to {decoder.frame_bytes_max} bytes, got {length}",
                    decoder._consumed + at,
                )
            frame_end = at + LENGTH_BYTES + length
            if frame_end <= end:
                frame = decoder._cut(self._chunk, p, at, frame_end)
                self._at = frame_end
                decoder._left = end - frame_end
                return frame
        # The rest is kept until the rest of its frame arrives.
        self._decoder = None
        decoder._left = 0
        decoder._consumed += at
        # Known once the length word is complete; until then any byte may complete it.
        decoder._missing = LENGTH_BYTES + length if end - at >= LENGTH_BYTES else 0
        if at < end:
            # Not appended, so that a second iterator cannot make it longer than a frame.
            decoder._pending = PyByteArray_FromStringAndSize(<char*>p + at, end - at)
        self._chunk = b""
        raise StopIteration

    cdef Frame _begin(self, FrameDecoder decoder):
        """Return the frame that earlier chunks began, if there is one; the rest is not copied."""
        cdef Py_ssize_t pending = PyByteArray_GET_SIZE(decoder._pending), at
        cdef bytearray data
        cdef Frame frame
        if decoder._error is not None:
            self._decoder = None
            raise decoder._error
        if not pending:
            return None
        if not decoder._missing:
            self._chunk = bytes(decoder._pending + self._chunk)
            decoder._pending = bytearray()
            return None
        at = decoder._missing - pending
        if at > PyBytes_GET_SIZE(self._chunk):
            _append(decoder._pending, <const unsigned char*>PyBytes_AS_STRING(self._chunk), PyBytes_GET_SIZE(self._chunk))
            self._decoder = None
            self._chunk = b""
            return None
        _append(decoder._pending, <const unsigned char*>PyBytes_AS_STRING(self._chunk), at)
        data = decoder._pending
        decoder._pending = bytearray()
        owner = bytes(data) if decoder._missing < LARGE_BYTES else memoryview(data)
        frame = decoder._cut(owner, _start_of(owner), 0, decoder._missing)
        # What follows counts from the start of its chunk.
        decoder._consumed += decoder._missing - at
        self._at = at
        decoder._left = PyBytes_GET_SIZE(self._chunk) - at
        return frame


cdef int _append(bytearray data, const unsigned char* p, Py_ssize_t n) except -1:
    cdef Py_ssize_t before = PyByteArray_GET_SIZE(data)
    PyByteArray_Resize(data, before + n)
    memcpy(PyByteArray_AS_STRING(data) + before, p, n)
    return 0


cdef FrameDecoder _RESPONSES = FrameDecoder(typed_responses=True)


def read_response(data, Py_ssize_t at, Py_ssize_t end):
    """Read the frame at a position of a buffer, and return it with the positions of its body."""
    cdef _Bytes held = _Bytes.__new__(_Bytes, data)
    if not 0 <= at <= end <= held.size:
        raise ValueError(f"no frame between {at} and {end} of {held.size} bytes")
    if end - at < PREFIX_BYTES:
        return at + PREFIX_BYTES
    cdef const unsigned char* p = <const unsigned char*>held.start + at
    cdef int64_t length = <int32_t>load_u32(p)
    cdef Py_ssize_t header_len = load_u32(p + LENGTH_BYTES) & 0xFFFFFF
    if not LENGTH_BYTES <= length <= FRAME_BYTES_MAX:
        raise FrameError(f"a frame must be 4 to {FRAME_BYTES_MAX} bytes, got {length}", at)
    if header_len > length - LENGTH_BYTES or header_len > HEADER_MAX:
        is_beyond = header_len > length - LENGTH_BYTES
        raise _wrong_header(at, header_len, length + LENGTH_BYTES, is_beyond)
    if length + LENGTH_BYTES > end - at:
        return at + LENGTH_BYTES + length
    # A copy, as the buffer may be reused while the frame is not.
    cdef bytes owner = PyBytes_FromStringAndSize(<const char*>p, PREFIX_BYTES + header_len)
    cdef Frame frame = _RESPONSES._cut(
        owner, <const unsigned char*>PyBytes_AS_STRING(owner), 0, PREFIX_BYTES + header_len
    )
    frame.position = at + PREFIX_BYTES
    return frame, at + PREFIX_BYTES + header_len, at + LENGTH_BYTES + length
