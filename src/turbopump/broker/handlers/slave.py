"""Requests that a slave refuses because only the master's copy of the table counts."""

from __future__ import annotations

from turbopump.errors import RemoteError
from turbopump.net.connection import Connection
from turbopump.net.router import Handler
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command

_CHANGES_OFFSETS = (
    RequestCode.UPDATE_CONSUMER_OFFSET,
    RequestCode.UPDATE_CONSUMER_OFFSETS,
    RequestCode.CLONE_GROUP_OFFSET,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
)


def refusals() -> dict[int, Handler]:
    """Return the handlers that replace those of a master."""
    return dict.fromkeys(_CHANGES_OFFSETS, _refuse_offsets)


def _refuse_offsets(_request: Command, _peer: Connection) -> Command:
    raise RemoteError(
        ResponseCode.SYSTEM_ERROR,
        "this broker is a slave: offsets are committed and changed on its master",
    )
