"""Test support that runs hours of a cluster in seconds: virtual time, memory network, faults.

The fixtures of `turbopump.testing.pytest_plugin` are available in every pytest run, see
docs/guide/testing.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turbopump.testing.clock import VirtualClock
    from turbopump.testing.cluster import Cluster, broker_config
    from turbopump.testing.disk import Disk
    from turbopump.testing.listeners import InjectedFailure, failing
    from turbopump.testing.loop import (
        Deadlock,
        VirtualTimeLoop,
        run_virtual,
        virtual_loop,
        virtual_time,
        wait_until,
    )
    from turbopump.testing.machine import virtual_machine
    from turbopump.testing.memory_net import LinkQuality, MemoryHost, MemoryNetwork
    from turbopump.testing.server import RunningServer, running_server
    from turbopump.testing.sync_cluster import running_cluster
else:
    # Not before it is used: the pytest plugin is loaded in every pytest run of every user.
    _MODULES = {
        "Cluster": "turbopump.testing.cluster",
        "Deadlock": "turbopump.testing.loop",
        "Disk": "turbopump.testing.disk",
        "InjectedFailure": "turbopump.testing.listeners",
        "LinkQuality": "turbopump.testing.memory_net",
        "MemoryHost": "turbopump.testing.memory_net",
        "MemoryNetwork": "turbopump.testing.memory_net",
        "RunningServer": "turbopump.testing.server",
        "VirtualClock": "turbopump.testing.clock",
        "VirtualTimeLoop": "turbopump.testing.loop",
        "broker_config": "turbopump.testing.cluster",
        "failing": "turbopump.testing.listeners",
        "run_virtual": "turbopump.testing.loop",
        "running_cluster": "turbopump.testing.sync_cluster",
        "running_server": "turbopump.testing.server",
        "virtual_loop": "turbopump.testing.loop",
        "virtual_machine": "turbopump.testing.machine",
        "virtual_time": "turbopump.testing.loop",
        "wait_until": "turbopump.testing.loop",
    }

    def __getattr__(name):
        module = _MODULES.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(module), name)


__all__ = [
    "Cluster",
    "Deadlock",
    "Disk",
    "InjectedFailure",
    "LinkQuality",
    "MemoryHost",
    "MemoryNetwork",
    "RunningServer",
    "VirtualClock",
    "VirtualTimeLoop",
    "broker_config",
    "failing",
    "run_virtual",
    "running_cluster",
    "running_server",
    "virtual_loop",
    "virtual_machine",
    "virtual_time",
    "wait_until",
]
