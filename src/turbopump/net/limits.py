"""Limits of connections: everything that can grow has one here."""

from __future__ import annotations

from dataclasses import dataclass, fields

from turbopump.core import FRAME_BYTES_MAX
from turbopump.errors import InvalidArgument

_KIB = 1024

RECEIVE_BYTES_MAX = 512 * _KIB * _KIB
"""Default for what all connections of a server may have received and not served."""

RECEIVE_BYTES_MIN = 2 * FRAME_BYTES_MAX
"""Below this, one legal frame could close its connection."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one connection; the defaults are the protocol's where it has one."""

    frame_bytes_max: int = FRAME_BYTES_MAX
    """Longest frame; a longer one from the peer closes the connection."""

    requests_in_flight_max: int = 65_535
    """Own requests in flight; more wait for a free place."""

    handlers_running_max: int = 1024
    """The peer's requests that coroutines are serving; at the limit, reading pauses."""

    write_pause_bytes: int = 256 * _KIB
    """Unwritten bytes above which requests wait and a server stops reading."""

    unwritten_bytes_max: int = 64 * _KIB * _KIB
    """Unwritten bytes at which the connection is closed: the peer has stopped reading."""

    idle_ms: int = 120_000
    """Time without any read or write after which the connection is closed."""

    orphaned_handlers_ms: int = 30_000
    """How long handlers may keep running after their peer has closed the connection."""

    def __post_init__(self) -> None:
        for field in fields(self):
            require_at_least(field.name, getattr(self, field.name), 1)
        floor = self.frame_bytes_max + self.write_pause_bytes
        # Below this, one legal answer to a healthy peer could close its connection.
        require_at_least("unwritten_bytes_max", self.unwritten_bytes_max, floor)


def require_at_least(name: str, value: object, least: int) -> None:
    """Raise InvalidArgument if a setting is not a whole number or too small."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(f"{name} must be a whole number of at least {least}, got {value!r}")


DEFAULT_LIMITS = ConnectionLimits()
