"""Asking a broker for a group's members, so that all of them compute the same shares."""

from __future__ import annotations

import logging

from turbopump.client import calls
from turbopump.client.session import Session
from turbopump.errors import RemoteError

_log = logging.getLogger(__name__)


async def group_members(session: Session, address: str, group: str) -> list[str]:
    """Return the client ids of a group's members, including this client's own if possible.

    A list without it means that the broker lost track of this client, and that the other members
    share its queues now or soon. So it sends a heartbeat and asks again. If the id is still
    missing, the list is returned unchanged: it gives this client no queues, since two owners of a
    queue are worse than none. Raises TurbopumpError if the broker does not respond: then no member
    is known to have taken over, and the caller keeps its queues until it can ask again.
    """
    timeout_ms = session.config.request_timeout_ms
    try:
        members = await calls.consumer_ids(session, address, group, timeout_ms)
    except RemoteError:
        # Brokers respond this way if a group has no members at all.
        members = []
    if session.client_id in members:
        return members
    await session.heartbeat_to(address)
    members = await calls.consumer_ids(session, address, group, timeout_ms)
    if session.client_id not in members:
        _log.warning(
            "%s does not list this client, %s, as a member of %s although it has just sent a"
            " heartbeat: it owns no queues until the list names it",
            address,
            session.client_id,
            group,
        )
    return members
