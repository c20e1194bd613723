"""Bodies that identify their message, and show whether they are intact."""

from __future__ import annotations

_PATTERN = b"the quick brown fox jumps over the lazy dog "

DamagedBodies = dict[bytes, str]
"""The messages of bodies in which faults have flipped bits."""


def body_of(key: str, size: int) -> bytes:
    """Return a body of about a size for a message."""
    start = f"{key}|{size}|".encode()
    pattern = key.encode() + _PATTERN
    return start + (pattern * (size // len(pattern) + 1))[:size]


def key_of(body: bytes) -> str | None:
    """Return the message of a body; None if it was never sent."""
    try:
        key, size, _ = body.split(b"|", 2)
        return key.decode() if body == body_of(key.decode(), int(size)) else None
    except ValueError:
        return None
