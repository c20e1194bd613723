# Hashes and checksums; equals `reference.hashing`. Included first: the other parts call its C functions.

from libc.stdint cimport int16_t, int32_t, int64_t, uint32_t, uint64_t
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.unicode cimport PyUnicode_DATA, PyUnicode_GET_LENGTH, PyUnicode_KIND, PyUnicode_READ

cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>

    #define CRC_POLYNOMIAL 0xEDB88320u

    static uint32_t crc_table[8][256];
    static int crc_folds, crc_folds_widely;

    static void crc_prepare(void) {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t value = byte;
            for (int bit = 0; bit < 8; bit++)
                value = value & 1 ? CRC_POLYNOMIAL ^ value >> 1 : value >> 1;
            crc_table[0][byte] = value;
        }
        for (int byte = 0; byte < 256; byte++)
            for (int row = 1; row < 8; row++) {
                uint32_t before = crc_table[row - 1][byte];
                crc_table[row][byte] = crc_table[0][before & 0xFF] ^ before >> 8;
            }
    #if defined(__x86_64__) && defined(__GNUC__)
        crc_folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
        crc_folds_widely = crc_folds && __builtin_cpu_supports("avx512f")
            && __builtin_cpu_supports("vpclmulqdq");
    #endif
    }

    /* Eight bytes a step; takes and returns the inverted checksum. */
    static uint32_t crc_sliced(uint32_t crc, const unsigned char *p, size_t n) {
        while (n >= 8) {
            crc ^= p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
            crc = crc_table[7][crc & 0xFF] ^ crc_table[6][crc >> 8 & 0xFF]
                ^ crc_table[5][crc >> 16 & 0xFF] ^ crc_table[4][crc >> 24]
                ^ crc_table[3][p[4]] ^ crc_table[2][p[5]] ^ crc_table[1][p[6]] ^ crc_table[0][p[7]];
            p += 8;
            n -= 8;
        }
        while (n--)
            crc = crc_table[0][(crc ^ *p++) & 0xFF] ^ crc >> 8;
        return crc;
    }

    #if defined(__x86_64__) && defined(__GNUC__)
    #include <immintrin.h>

    /* Folding by carry-less multiplication (Gopal and others, "Fast CRC Computation for Generic
       Polynomials Using PCLMULQDQ Instruction", 2009). Each constant is the remainder of a power
       of x, which moves 64 bits by as many as its name says; all are reflected. */
    #define BY_2048 0x01322d1430, 0x011542778a
    #define BY_512 0x01c6e41596, 0x0154442bd4
    #define BY_128 0x00ccaa009e, 0x01751997d0
    #define BY_64 0, 0x0163cd6124
    #define BARRETT 0x01f7011641, 0x01db710641
    #define FOLD(x, k, next) _mm_xor_si128(_mm_xor_si128( \
        _mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next)
    #define FOLD_WIDE(x, k, next) _mm512_ternarylogic_epi64( \
        _mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), next, 0x96)
    #define LOAD(at) _mm_loadu_si128((const __m128i *)(p + (at)))
    #define LOAD_WIDE(at) _mm512_loadu_si512((const void *)(p + (at)))
    #define LANE(x, lane) _mm512_extracti32x4_epi32(x, lane)

    /* Folds four lanes and what follows, a multiple of 16 bytes, into the checksum. */
    __attribute__((target("pclmul,sse4.1")))
    static uint32_t crc_joined(
        __m128i a, __m128i b, __m128i c, __m128i d, const unsigned char *p, size_t n
    ) {
        const __m128i by_128 = _mm_set_epi64x(BY_128);
        const __m128i barrett = _mm_set_epi64x(BARRETT);
        const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);
        a = FOLD(a, by_128, b);
        a = FOLD(a, by_128, c);
        a = FOLD(a, by_128, d);
        for (; n >= 16; p += 16, n -= 16)
            a = FOLD(a, by_128, LOAD(0));
        a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_128, 0x10));
        b = _mm_srli_si128(a, 4);
        a = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), _mm_set_epi64x(BY_64), 0x00);
        a = _mm_xor_si128(a, b);
        b = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), barrett, 0x10);
        b = _mm_clmulepi64_si128(_mm_and_si128(b, low_words), barrett, 0x00);
        return (uint32_t)_mm_extract_epi32(_mm_xor_si128(a, b), 1);
    }

    /* 64 bytes a step; n is at least 64 and divisible by 16. */
    __attribute__((target("pclmul,sse4.1")))
    static uint32_t crc_folded(uint32_t crc, const unsigned char *p, size_t n) {
        const __m128i by_512 = _mm_set_epi64x(BY_512);
        __m128i a = _mm_xor_si128(LOAD(0), _mm_cvtsi32_si128((int)crc));
        __m128i b = LOAD(16), c = LOAD(32), d = LOAD(48);
        for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
            a = FOLD(a, by_512, LOAD(0));
            b = FOLD(b, by_512, LOAD(16));
            c = FOLD(c, by_512, LOAD(32));
            d = FOLD(d, by_512, LOAD(48));
        }
        return crc_joined(a, b, c, d, p, n);
    }

    /* 256 bytes a step; n is at least 256 and divisible by 16. */
    __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1")))
    static uint32_t crc_folded_widely(uint32_t crc, const unsigned char *p, size_t n) {
        const __m512i by_2048 = _mm512_broadcast_i32x4(_mm_set_epi64x(BY_2048));
        const __m512i by_512 = _mm512_broadcast_i32x4(_mm_set_epi64x(BY_512));
        __m512i start = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc));
        __m512i a = _mm512_xor_si512(LOAD_WIDE(0), start);
        __m512i b = LOAD_WIDE(64), c = LOAD_WIDE(128), d = LOAD_WIDE(192);
        for (p += 256, n -= 256; n >= 256; p += 256, n -= 256) {
            a = FOLD_WIDE(a, by_2048, LOAD_WIDE(0));
            b = FOLD_WIDE(b, by_2048, LOAD_WIDE(64));
            c = FOLD_WIDE(c, by_2048, LOAD_WIDE(128));
            d = FOLD_WIDE(d, by_2048, LOAD_WIDE(192));
        }
        a = FOLD_WIDE(a, by_512, b);
        a = FOLD_WIDE(a, by_512, c);
        a = FOLD_WIDE(a, by_512, d);
        for (; n >= 64; p += 64, n -= 64)
            a = FOLD_WIDE(a, by_512, LOAD_WIDE(0));
        return crc_joined(LANE(a, 0), LANE(a, 1), LANE(a, 2), LANE(a, 3), p, n);
    }
    #endif

    static uint32_t crc_of(const unsigned char *p, size_t n) {
        uint32_t crc = ~0u;
    #if defined(__x86_64__) && defined(__GNUC__)
        if (crc_folds && n >= 64) {
            size_t whole = n & ~(size_t)15;
            crc = crc_folds_widely && n >= 256
                ? crc_folded_widely(crc, p, whole) : crc_folded(crc, p, whole);
            p += whole;
            n -= whole;
        }
    #endif
        return ~crc_sliced(crc, p, n);
    }

    /* How many bytes at p are one code point of valid UTF-8; if they are not, the negative length
       of what Python's decoder replaces by one U+FFFD. */
    static int utf8_step(const unsigned char *p, size_t n, uint32_t *point) {
        unsigned char first = p[0];
        if (first < 0x80) { *point = first; return 1; }
        if (first < 0xC2 || first > 0xF4) return -1;
        int length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
        unsigned char low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
        unsigned char high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        if (n < 2 || p[1] < low || p[1] > high) return -1;
        uint32_t value = (first & (0x7F >> length)) << 6 | (p[1] & 0x3F);
        for (int at = 2; at < length; at++) {
            if ((size_t)at >= n || (p[at] & 0xC0) != 0x80) return -at;
            value = value << 6 | (p[at] & 0x3F);
        }
        *point = value;
        return length;
    }

    static int utf8_is_valid(const unsigned char *p, size_t n) {
        uint32_t point;
        while (n) {
            uint64_t word;
            if (n >= 8 && (memcpy(&word, p, 8), !(word & 0x8080808080808080u))) {
                p += 8;
                n -= 8;
                continue;
            }
            int step = utf8_step(p, n, &point);
            if (step < 0) return 0;
            p += step;
            n -= (size_t)step;
        }
        return 1;
    }

    static uint32_t java_hash(const unsigned char *p, size_t n, uint32_t value) {
        while (n) {
            uint32_t word;
            if (n >= 4 && (memcpy(&word, p, 4), !(word & 0x80808080u))) {
                value = value * 923521u + p[0] * 29791u + p[1] * 961u + p[2] * 31u + p[3];
                p += 4;
                n -= 4;
                continue;
            }
            uint32_t point = 0xFFFD;
            int step = utf8_step(p, n, &point);
            if (step < 0) { point = 0xFFFD; step = -step; }
            if (point > 0xFFFF) {
                value = value * 31u + (0xD7C0u + (point >> 10));
                point = 0xDC00u | (point & 0x3FFu);
            }
            value = value * 31u + point;
            p += step;
            n -= (size_t)step;
        }
        return value;
    }
    """
    void crc_prepare() noexcept nogil
    uint32_t crc_of(const unsigned char* p, size_t n) noexcept nogil
    int utf8_is_valid(const unsigned char* p, size_t n) noexcept nogil
    uint32_t java_hash(const unsigned char* p, size_t n, uint32_t value) noexcept nogil

crc_prepare()


cdef inline uint32_t c_body_crc(const unsigned char* p, Py_ssize_t n) noexcept nogil:
    """The CRC-32 of bytes with the sign bit cleared."""
    return crc_of(p, <size_t>n) & 0x7FFFFFFF


cdef inline int32_t c_java_hash(const unsigned char* p, Py_ssize_t n, uint32_t start) noexcept nogil:
    """Java's String.hashCode of UTF-8, continuing from a hash; invalid bytes count as U+FFFD."""
    return <int32_t>java_hash(p, <size_t>n, start)


cdef inline bint c_is_utf8(const unsigned char* p, Py_ssize_t n) noexcept nogil:
    return utf8_is_valid(p, <size_t>n)


cdef uint32_t _text_hash(str text, uint32_t value):
    """Java's hash of a string, continuing from a hash; lone surrogates count as they are."""
    cdef Py_ssize_t at, length = PyUnicode_GET_LENGTH(text)
    cdef int kind = PyUnicode_KIND(text)
    cdef void* data = PyUnicode_DATA(text)
    cdef uint32_t point
    for at in range(length):
        point = PyUnicode_READ(kind, data, at)
        if point > 0xFFFF:
            value = value * 31 + (0xD7C0 + (point >> 10))
            point = 0xDC00 | (point & 0x3FF)
        value = value * 31 + point
    return value


def string_hash(str text not None):
    """Return Java's hash of a string: a signed 32-bit number over its UTF-16 code units."""
    return <int32_t>_text_hash(text, 0)


def tags_code(str tags):
    """Return the hash of a message's tag in a consume queue; 0 if it has none."""
    return 0 if tags is None else <int32_t>_text_hash(tags, 0)


def index_hash(str topic not None, str key not None):
    """Return the key index's hash of a key; never negative."""
    cdef uint32_t value = _text_hash(key, _text_hash(topic, 0) * 31 + 35)
    if value == 0x80000000:
        return 0
    return 0 - value if value > 0x7FFFFFFF else value


def body_crc(body):
    """Return the CRC-32 of a stored body with the sign bit cleared."""
    cdef Py_buffer view
    cdef uint32_t value
    if type(body) is bytes:
        return c_body_crc(<const unsigned char*><char*><bytes>body, len(<bytes>body))
    PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
    value = c_body_crc(<const unsigned char*>view.buf, view.len)
    PyBuffer_Release(&view)
    return value


cdef inline uint64_t _rotated(uint64_t value, int bits) noexcept nogil:
    return value << bits | value >> (64 - bits)


cdef inline uint64_t _avalanche(uint64_t value) noexcept nogil:
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCDu
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53u
    return value ^ value >> 33


cdef inline uint64_t _word(const unsigned char* p, Py_ssize_t n) noexcept nogil:
    """The little-endian number of up to 8 bytes."""
    cdef uint64_t word = 0
    cdef Py_ssize_t at
    for at in range(n if n < 8 else 8):
        word |= <uint64_t>p[at] << (8 * at)
    return word


cdef uint64_t _murmur3(const unsigned char* p, Py_ssize_t n) noexcept nogil:
    cdef uint64_t first = 0, second = 0, low, high
    cdef Py_ssize_t left = n
    while True:
        low = _word(p, left)
        high = _word(p + 8, left - 8) if left > 8 else 0
        low = _rotated(low * 0x87C37B91114253D5u, 31) * 0x4CF5AD432745937Fu
        high = _rotated(high * 0x4CF5AD432745937Fu, 33) * 0x87C37B91114253D5u
        first ^= low
        if left < 16:
            break
        first = (_rotated(first, 27) + second) * 5 + 0x52DCE729
        second = (_rotated(second ^ high, 31) + first) * 5 + 0x38495AB5
        p += 16
        left -= 16
    first ^= <uint64_t>n
    second ^= high ^ <uint64_t>n
    first += second
    second += first
    return _avalanche(first) + _avalanche(second)


def murmur3(bytes data not None):
    """Return the first half of the 128-bit MurmurHash3 (x64) with seed 0."""
    return _murmur3(<const unsigned char*><char*>data, len(data))


def bloom_positions(str text not None, uint32_t bits, int hashes):
    """Return a string's positions in a bloom filter: combinations of the halves of one hash."""
    cdef bytes data = text.encode()
    cdef uint64_t value = _murmur3(<const unsigned char*><char*>data, len(data))
    cdef uint32_t low = <uint32_t>value, high = <uint32_t>(value >> 32), total = low
    cdef int number
    if not bits:
        raise ZeroDivisionError("integer modulo by zero")
    positions = []
    for number in range(hashes):
        total += high
        # As a signed 32-bit number; the complement of a negative one is positive.
        positions.append((~total if total > 0x7FFFFFFF else total) % bits)
    return positions
