"""The configuration that a broker passes to the filter servers that it starts."""

from __future__ import annotations

from msgspec import Struct

MEMORY_BYTES_MIN = 64 * 1024 * 1024
"""The interpreter alone takes a third of it."""


class CodeLimits(Struct, frozen=True, kw_only=True):
    """What code filters may use."""

    memory_bytes_max: int = 128 * 1024 * 1024
    """Address space of a filter's process, the interpreter included."""
    cpu_ms_max: int = 100
    """CPU time for one message."""
    time_ms_max: int = 5000
    """Elapsed time for one message, even while the machine does something else."""
    filters_max: int = 64
    """Filters of one filter server; each has a process."""


class FilterServerConfig(Struct, frozen=True, kw_only=True):
    """Where a filter server listens, the address clients get, and the broker it belongs to."""

    broker: str
    """Where it reaches the broker, as host:port."""
    bind_host: str
    advertised_host: str
    port: int = 0
    limits: CodeLimits = CodeLimits()
