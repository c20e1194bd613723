"""Hashes, checksums and ids: both versions equal the recorded values and each other."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cores import BUFFERS, VERSIONS, exact, needs_both, outcome
from turbopump.wire.hosts import host
from vectors import case, load

TEXTS = st.text(st.characters(), max_size=30)


@pytest.mark.parametrize("core", VERSIONS)
def test_recorded_tags(core: Any) -> None:
    for each in load("hashes.json")["tags"]:
        with case(each):
            assert core.tags_code(each["tag"]) == each["tagsCode"]
            if each["tag"] is not None:
                assert core.string_hash(each["tag"]) == each["hash"]


@pytest.mark.parametrize("core", VERSIONS)
def test_recorded_keys_and_checksums(core: Any) -> None:
    recorded = load("hashes.json")
    for each in recorded["indexKeys"]:
        with case(each):
            assert core.index_hash(each["topic"], each["key"]) == each["keyHash"]
    for each in recorded["bodyCrc"]:
        with case(each):
            assert core.body_crc(exact(bytes.fromhex(each["bodyHex"]))) == each["crc"]


@pytest.mark.parametrize("core", VERSIONS)
def test_recorded_offset_ids(core: Any) -> None:
    for each in load("hashes.json")["offsetIds"]:
        with case(each):
            ip = host(each["host"], each["port"]).ip
            assert core.offset_id(ip, each["port"], each["offset"]) == each["id"]


@pytest.mark.parametrize("core", VERSIONS)
def test_known_values(core: Any) -> None:
    assert core.index_hash("", "") == 35
    # The smallest number has no positive one.
    assert core.string_hash("polygenelubricants") == -(2**31)
    assert core.index_hash("T", "k") == abs(core.string_hash("T#k"))
    assert core.body_crc(b"123456789") == 0xCBF43926 & 0x7FFFFFFF


@needs_both
@given(TEXTS, TEXTS, st.integers(1, 2**31), st.integers(0, 8))
def test_versions_hash_texts_equally(topic: str, key: str, bits: int, hashes: int) -> None:
    first, second = (
        (
            core.string_hash(key),
            core.tags_code(key),
            core.index_hash(topic, key),
            outcome(core.bloom_positions, key, bits, hashes),
        )
        for core in VERSIONS
    )
    assert first == second


@given(st.binary(max_size=700), st.integers(0, 20), st.integers(0, 3000), BUFFERS)
def test_checksums(data: bytes, skipped: int, repeated: int, buffer: Any) -> None:
    data += bytes(range(256)) * (repeated // 256) + data[:repeated]
    for core in VERSIONS:
        part = memoryview(data)[skipped:]
        assert core.body_crc(part) == core.body_crc(bytes(part)) == zlib.crc32(part) & 0x7FFFFFFF
        assert core.body_crc(buffer(bytes(part))) == core.body_crc(part)
        assert core.murmur3(data) == VERSIONS[0].murmur3(data)


def test_what_is_not_bytes_has_no_checksum() -> None:
    for core in VERSIONS:
        with pytest.raises(TypeError):
            core.body_crc("text")
        with pytest.raises(BufferError):
            core.body_crc(memoryview(b"abcd")[::2])


IPS = st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16)
OFFSETS = st.integers(-(2**63), 2**63 - 1)


@given(IPS, st.integers(-(2**31), 2**31 - 1), st.lists(OFFSETS, max_size=5))
def test_offset_ids(ip: bytes, port: int, offsets: list[int]) -> None:
    for core in VERSIONS:
        each = [core.offset_id(ip, port, offset) for offset in offsets]
        assert each == [VERSIONS[0].offset_id(ip, port, offset) for offset in offsets]
        assert core.offset_ids(ip, port, offsets) == ",".join(each)
    with pytest.raises(OverflowError):
        core.offset_id(ip, port, 2**63)


@given(st.binary(min_size=10, max_size=22), st.integers(0, 2**32 - 1), st.integers(0, 2**40))
def test_unique_ids(maker: bytes, elapsed_ms: int, counter: int) -> None:
    for core in VERSIONS:
        prefix = core.unique_id_prefix(maker, elapsed_ms)
        assert prefix == (maker + elapsed_ms.to_bytes(4, "big")).hex().upper()
        assert core.unique_id(prefix, counter) == f"{prefix}{counter & 0xFFFF:04X}"
        assert core.unique_ids(prefix, iter([counter, 1])) == [
            core.unique_id(prefix, counter),
            core.unique_id(prefix, 1),
        ]
