"""Administration: what operators do with clusters, topics, groups, offsets and messages.

::

    from turbopump.admin import Admin

    with Admin("127.0.0.1:9876") as admin:
        print(admin.groups.progress("billing").lag)

`turbopump.aio.Admin` has the same for programs with an event loop.
"""

from typing import TYPE_CHECKING

from turbopump.lazy_names import lazy_names

if TYPE_CHECKING:
    from turbopump.admin.blocking import Admin
    from turbopump.admin.cluster import BrokerStatus, Cluster, ClusterStatus, Promoted
    from turbopump.admin.configuration import SettingChange
    from turbopump.admin.dead_letters import (
        REDRIVEN_FROM,
        DeadLetter,
        Destination,
        LetterFilter,
        Outcome,
        Redriven,
    )
    from turbopump.admin.groups import GroupChange, GroupInfo, GroupSettings
    from turbopump.admin.members import Connection, Difference, HeldQueue, Inside, Member, Members
    from turbopump.admin.messages import Consumed
    from turbopump.admin.offsets import Plan, QueueChange
    from turbopump.admin.positions import AtOffset, AtTime, Earliest, Last, Latest
    from turbopump.admin.progress import Progress, QueueProgress
    from turbopump.admin.range_reader import Span
    from turbopump.admin.servers import BrokerNode
    from turbopump.admin.topics import QueueLimits, TopicInfo, TopicKind, TopicRouting, TopicStatus
    from turbopump.admin.transactions import PendingState, PendingTransaction
else:
    _HOMES = {
        "admin.blocking": "Admin",
        "admin.cluster": "BrokerStatus Cluster ClusterStatus Promoted",
        "admin.configuration": "SettingChange",
        "admin.dead_letters": "REDRIVEN_FROM DeadLetter Destination LetterFilter Outcome Redriven",
        "admin.groups": "GroupChange GroupInfo GroupSettings",
        "admin.members": "Connection Difference HeldQueue Inside Member Members",
        "admin.messages": "Consumed",
        "admin.offsets": "Plan QueueChange",
        "admin.positions": "AtOffset AtTime Earliest Last Latest",
        "admin.progress": "Progress QueueProgress",
        "admin.range_reader": "Span",
        "admin.servers": "BrokerNode",
        "admin.topics": "QueueLimits TopicInfo TopicKind TopicRouting TopicStatus",
        "admin.transactions": "PendingState PendingTransaction",
    }
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)

__all__ = [
    "REDRIVEN_FROM",
    "Admin",
    "AtOffset",
    "AtTime",
    "BrokerNode",
    "BrokerStatus",
    "Cluster",
    "ClusterStatus",
    "Connection",
    "Consumed",
    "DeadLetter",
    "Destination",
    "Difference",
    "Earliest",
    "GroupChange",
    "GroupInfo",
    "GroupSettings",
    "HeldQueue",
    "Inside",
    "Last",
    "Latest",
    "LetterFilter",
    "Member",
    "Members",
    "Outcome",
    "PendingState",
    "PendingTransaction",
    "Plan",
    "Progress",
    "Promoted",
    "QueueChange",
    "QueueLimits",
    "QueueProgress",
    "Redriven",
    "SettingChange",
    "Span",
    "TopicInfo",
    "TopicKind",
    "TopicRouting",
    "TopicStatus",
]
