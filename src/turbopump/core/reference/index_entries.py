"""Entries of the key index: each is linked to an older one of the same hash slot."""

from __future__ import annotations

import struct

Buffer = bytes | bytearray | memoryview
Writable = bytearray | memoryview

ENTRY = struct.Struct(">iqii")
"""Hash, position in the log, seconds since the file's first entry, and the entry before it."""
_SLOT = struct.Struct(">i")
_PREVIOUS_AT = 16


def whole_entries(entries: Buffer, log_end: int, *, has_position_0: bool) -> int:
    """Count the entries before the first that was not completely written, or is not of this log.

    Their positions ascend and lie before ``log_end``. A page that never reached the disk reads as
    zeros: position 0 is valid only if the file ``has_position_0``.
    """
    before = -1
    for number, (key_hash, position, seconds, _) in enumerate(_rows(entries)):
        is_whole = before <= position < log_end and key_hash >= 0 and seconds >= 0
        if not is_whole or (position <= 0 and not has_position_0):
            return number
        before = position
    return len(entries) // ENTRY.size


def chain_entries(
    entries: bytearray | memoryview, slots: bytearray | memoryview, first: int
) -> int:
    """Link new entries into their slots; return how many of these were empty.

    ``slots`` holds the number of the newest entry of each slot, ``first`` is the number of the
    first new one. Numbers in slots that no older entry has count as none.
    """
    slot_count = len(slots) // _SLOT.size
    empty = 0
    for number, (key_hash, _, _, _) in enumerate(_rows(bytes(entries))):
        slot_at = key_hash % slot_count * _SLOT.size
        (previous,) = _SLOT.unpack_from(slots, slot_at)
        if previous >= first:
            # It counts if it is new itself, and not what an earlier crash has left.
            is_new = previous < first + number and (
                ENTRY.unpack_from(entries, (previous - first) * ENTRY.size)[0] % slot_count
                == key_hash % slot_count
            )
            previous = previous if is_new else 0
        previous = max(0, previous)
        empty += previous == 0
        _SLOT.pack_into(entries, number * ENTRY.size + _PREVIOUS_AT, previous)
        _SLOT.pack_into(slots, slot_at, first + number)
    return empty


def _rows(entries: Buffer) -> list[tuple[int, int, int, int]]:
    return list(ENTRY.iter_unpack(bytes(entries[: len(entries) // ENTRY.size * ENTRY.size])))
