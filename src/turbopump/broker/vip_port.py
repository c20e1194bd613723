"""The VIP port, where Java clients before 4.5 and Apache slaves expect a broker."""

from __future__ import annotations

import logging

from turbopump.errors import ListenFailed
from turbopump.net.router import Router
from turbopump.net.server import Server

_log = logging.getLogger(__name__)


async def listen_for_vip(server: Server, port: int | None, router: Router) -> None:
    """Serve the VIP port too, unless it is None or taken: newer clients do not need it."""
    if port is None:
        return
    try:
        await server.listen_also(port, router)
    except ListenFailed as error:
        _log.warning(
            "the VIP port is not served, which Java clients before 4.5 and Apache slaves need:"
            " %s; free the port or choose another listenPort (vipChannelEnable=false ends"
            " this warning)",
            error,
        )
