"""Bodies that identify their message, and show whether they are intact."""

from __future__ import annotations

_PATTERN = b"the quick brown fox jumps over the lazy dog "


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


class Bodies:
    """The messages of bodies before faults flipped bits in them."""

    def __init__(self) -> None:
        self._damaged: dict[bytes, str] = {}

    def damage(self, body: bytes, key: str) -> None:
        """Record what the body of a message has become."""
        self._damaged[body] = key

    def damaged_key(self, body: bytes) -> str | None:
        """Return the message of a damaged body; None if no fault has damaged it."""
        return self._damaged.get(body)
