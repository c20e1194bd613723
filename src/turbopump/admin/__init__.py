"""Administration: what operators do with clusters, topics, groups, offsets and messages.

::

    from turbopump.admin import Admin

    async with Admin("127.0.0.1:9876") as admin:
        print((await admin.groups.progress("billing")).lag)

`turbopump.admin.blocking` has the same for programs without an event loop.
"""

from turbopump.admin.administration import Admin
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
