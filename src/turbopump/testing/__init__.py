"""Test support that runs hours of a cluster in seconds: virtual time, memory network, faults.

The fixtures of `turbopump.testing.pytest_plugin` are available in every pytest run, see
docs/guide/testing.md.
"""

from typing import TYPE_CHECKING

from turbopump.lazy_names import lazy_names

if TYPE_CHECKING:
    from turbopump.testing.clock import VirtualClock
    from turbopump.testing.cluster import Cluster, broker_config, running_cluster
    from turbopump.testing.disk import Disk, virtual_machine
    from turbopump.testing.listeners import InjectedFailure, failing
    from turbopump.testing.loop import (
        Deadlock,
        VirtualTimeLoop,
        run_virtual,
        virtual_loop,
        virtual_time,
        wait_until,
    )
    from turbopump.testing.memory_net import LinkQuality, MemoryHost, MemoryNetwork
    from turbopump.testing.server import RunningServer, running_server
else:
    # Not before it is used: the pytest plugin is loaded in every pytest run of every user.
    _HOMES = {
        "testing.clock": "VirtualClock",
        "testing.cluster": "Cluster broker_config running_cluster",
        "testing.disk": "Disk virtual_machine",
        "testing.listeners": "InjectedFailure failing",
        "testing.loop": "Deadlock VirtualTimeLoop run_virtual virtual_loop virtual_time wait_until",
        "testing.memory_net": "LinkQuality MemoryHost MemoryNetwork",
        "testing.server": "RunningServer running_server",
    }
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)


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
