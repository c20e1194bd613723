"""Asking a broker who is in a group, so that every member works out the same shares."""

from __future__ import annotations

import logging

from turbopump.client import calls
from turbopump.client.session import Session
from turbopump.errors import RemoteError

_log = logging.getLogger(__name__)


async def group_members(session: Session, address: str, group: str) -> list[str]:
    """Return the client ids of a group's members, this client's own included if at all possible.

    A list without it means that the broker has lost sight of this client, and that the others are
    about to share its queues, or do so already. So the broker is told again and asked again. If the
    list still lacks it, it is returned as it is: it gives this client nothing, since two owners of
    a queue are worse than none. Raises TurbopumpError when the broker does not answer: then nobody
    is known to have taken anything, and the caller keeps what it has until it can ask again.
    """
    timeout_ms = session.config.request_timeout_ms
    try:
        members = await calls.consumer_ids(session, address, group, timeout_ms)
    except RemoteError:
        # Brokers answer so when a group has no members at all.
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
