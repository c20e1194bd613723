"""Which tables a slave copies, and how it adopts each."""

from __future__ import annotations

import logging

from turbopump.broker.consumer_filters import ConsumerFilterTable
from turbopump.broker.delay_recovery import SavedDelays
from turbopump.broker.delays import Delays
from turbopump.broker.replication.table_copy import CopiedTable, Copy
from turbopump.broker.state import State
from turbopump.message import PhysicalOffset
from turbopump.store.store import Store
from turbopump.wire.bodies import ConsumerOffsets, GroupConfigTable, TopicConfigTable
from turbopump.wire.codes import RequestCode

_log = logging.getLogger(__name__)


def copied_tables(state: State, delays: Delays, store: Store) -> tuple[CopiedTable, ...]:
    """Return the tables of a slave, to be copied from its master."""
    topics, groups, offsets = state.topics, state.groups, state.offsets

    def adopt_topics(copy: Copy) -> None:
        # An Apache master does not say where its log ended then.
        end = PhysicalOffset(copy.log_end) if copy.version else None
        for name in topics.adopt_copy(TopicConfigTable.decode(copy.body)):
            _log.info("topic %s was deleted on the master: its queues are deleted here too", name)
            store.remove_topic(name, end)

    return (
        CopiedTable(
            what="topics",
            code=RequestCode.GET_ALL_TOPIC_CONFIG,
            adopt=adopt_topics,
            is_watched=True,
        ),
        CopiedTable(
            what="groups",
            code=RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
            adopt=lambda copy: groups.adopt_copy(GroupConfigTable.decode(copy.body)),
            is_watched=True,
        ),
        CopiedTable(
            what="offsets",
            code=RequestCode.GET_ALL_CONSUMER_OFFSET,
            adopt=lambda copy: offsets.adopt_copy(ConsumerOffsets.decode(copy.body)),
            follows_log=True,
        ),
        CopiedTable(
            what="delay progress",
            code=RequestCode.GET_ALL_DELAY_OFFSET,
            adopt=lambda copy: delays.adopt_copy(SavedDelays.decode(copy.body)),
            follows_log=True,
        ),
        CopiedTable(
            what="consumer filters",
            code=RequestCode.GET_ALL_CONSUMER_FILTERS,
            adopt=lambda copy: state.consumer_filters.merge_copy(
                ConsumerFilterTable.decode(copy.body)
            ),
            is_optional=True,
        ),
    )
