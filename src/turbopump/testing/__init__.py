"""What tests need to run hours of a cluster in milliseconds: virtual time, memory network."""

from turbopump.testing.clock import VirtualClock
from turbopump.testing.loop import (
    Deadlock,
    VirtualTimeLoop,
    run_virtual,
    virtual_loop,
    virtual_time,
    wait_until,
)
from turbopump.testing.memory_net import LinkQuality, MemoryHost, MemoryNetwork

__all__ = [
    "Deadlock",
    "LinkQuality",
    "MemoryHost",
    "MemoryNetwork",
    "VirtualClock",
    "VirtualTimeLoop",
    "run_virtual",
    "virtual_loop",
    "virtual_time",
    "wait_until",
]
