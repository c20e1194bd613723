"""Messages for both cores, valid and not, as their parts and as stored records."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import strategies as st

from turbopump.core import reference
from turbopump.errors import InvalidArgument

TOPICS = st.one_of(
    st.sampled_from([b"orders", b"a", b"%RETRY%g", "Gr\u00fc\u00dfe".encode(), b"."]),
    st.binary(max_size=130),
)
HOSTS = st.sampled_from([bytes(range(8)), bytes(range(20)), b"\x7f\0\0\x01\0\0\x2a\x9f"])
INTS = st.one_of(st.integers(0, 40), st.integers(-(2**31), 2**31 - 1))
LONGS = st.one_of(st.integers(0, 40), st.integers(-(2**63), 2**63 - 1))
FLAGS = st.one_of(st.sampled_from([0, 1, 4, 8, 12, 0x10, 0x30]), INTS)
NAMES = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "WAIT", "DELAY", "CLUSTER", "x", ""])
VALUES = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["true", "TRUE", "false", "a b  c", "", "\U0001f600 k", "0AF1", "polygenelubricants"]
    ),
)
TEXTS = st.one_of(
    st.lists(st.tuples(NAMES, VALUES), max_size=5).map(
        lambda entries: "\x02".join(f"{name}\x01{value}" for name, value in entries).encode(
            errors="replace"
        )
    ),
    st.binary(max_size=40),
).flatmap(lambda text: st.sampled_from([text, text + b"\x02"]))
BODIES = st.binary(max_size=200)
MESSAGES = st.tuples(TOPICS, INTS, BODIES, TEXTS, INTS, FLAGS, LONGS, HOSTS, HOSTS, INTS, LONGS)


def stored_messages(messages: list[tuple[Any, ...]], record_bytes_max: int = 4096) -> bytes:
    """Return the records of messages that are not refused."""
    block = reference.Block(record_bytes_max, record_bytes_max)
    for message in messages:
        with suppress(InvalidArgument):
            block.add(*message)
    return bytes(block.place(0, len(block), 0, [0] * len(block.queues), 1_700_000_000_000))
