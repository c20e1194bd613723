"""The layout of a stored record, byte for byte that of RocketMQ 4.9.

A record has a fixed part, whose size depends on the two hosts, the body, the length of the topic
in one byte, the topic, the length of the properties in two, and the properties.
"""

from __future__ import annotations

import struct

MAGIC = 0xDAA320A7
MAGIC_V2 = 0xDAA320AB
"""Release 5 only: a topic length of two bytes. Read, never written."""

FIXED_BYTES = 91
"""Size of a record without body, topic and properties, both hosts IPv4."""

TOPIC_BYTES_MAX = 127
PROPERTIES_BYTES_MAX = 32767

BORN_HOST_V6 = 0x10
STORE_HOST_V6 = 0x20
HOST_BITS = BORN_HOST_V6 | STORE_HOST_V6
HOST_BITS_SHIFT = 4
SYS_FLAG_LOW_BYTE_AT = 39

PREPARED = 0x4
ROLLBACK = 0xC
"""In the system flag: roles in a transaction. What both have in common is their visibility."""
INVISIBLE_BIT = PREPARED & ROLLBACK
"""Set in the system flag of prepared and rolled back messages, and of no others."""

# Indexed by the two bits of the system flag for the widths of the born and the store host: size,
# magic, checksum, queue id, flag, queue offset, position, system flag, born time, born host and
# port, store time, store host and port, attempts, position of a prepared message, body length.
FIXED = tuple(
    struct.Struct(f">iIiiiqqiq{born}siq{store}siiqi")
    for born, store in ((4, 4), (16, 4), (4, 16), (16, 16))
)
HEAD_BYTES_MAX = FIXED[-1].size
"""Size of what comes before the body, both hosts IPv6."""

QUEUE_OFFSET_AT = 20
POSITION_AT = 28
STORE_TIME_AT = (56, 68, 56, 68)
"""Place of the store timestamp, by the same bits."""

TEXT_LENGTH = struct.Struct(">h")
V2_TOPIC_LENGTH = struct.Struct(">h")
LENGTHS_BYTES = 3
"""Of topic and properties; the body's length belongs to the fixed part."""

UNIT = struct.Struct(">qiq")
"""A unit of a consume queue: position, size, and the hash of the tag."""

NAME_END = b"\x01"
ENTRY_END = b"\x02"
"""They end the name and the value of a property."""

TAGS = b"TAGS"
KEYS = b"KEYS"
UNIQUE_KEY = b"UNIQ_KEY"
WAIT = b"WAIT"
DELAY = b"DELAY"
TRANSACTION_PREPARED = b"TRAN_MSG"
