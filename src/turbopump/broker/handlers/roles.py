"""Requests that change which broker is master (91002, 91003), Turbopump's own."""

from __future__ import annotations

from turbopump.broker.config import Role
from turbopump.broker.handlers.common import as_remote_error
from turbopump.broker.replication.role_changes import RoleChanges
from turbopump.errors import RemoteError
from turbopump.net.connection import Connection
from turbopump.net.router import Handler
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.mastership import (
    FenceBroker,
    FenceBrokerAnswer,
    PromoteBroker,
    PromoteBrokerAnswer,
)

_MASTER_ROLES = (Role.ASYNC_MASTER.value, Role.SYNC_MASTER.value)


class RoleRequests:
    """Serves operators that promote a slave, and brokers that were promoted."""

    def __init__(self, changes: RoleChanges) -> None:
        self._changes = changes

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.PROMOTE_BROKER: self.promote,
            RequestCode.FENCE_BROKER: self.fence,
        }

    async def promote(self, request: Command, _peer: Connection) -> Command:
        """Make a slave the master; the broker restarts after the answer."""
        role = PromoteBroker.from_ext_fields(request.ext_fields).broker_role
        if role not in _MASTER_ROLES:
            text = f"brokerRole must be {' or '.join(_MASTER_ROLES)}, got {role[:100]!r}"
            raise RemoteError(ResponseCode.SYSTEM_ERROR, text)
        with as_remote_error():
            done = await self._changes.promote(Role(role))
        return request.answer(
            ResponseCode.SUCCESS,
            PromoteBrokerAnswer(
                epoch=done.epoch,
                log_end=done.log_end,
                missing_bytes=done.missing_bytes,
                old_master=done.old_master or None,
            ),
        )

    async def fence(self, request: Command, _peer: Connection) -> Command:
        """Stop the writes of a master: another broker is being promoted."""
        header = FenceBroker.from_ext_fields(request.ext_fields)
        with as_remote_error():
            end = await self._changes.fence(header.claim)
        return request.answer(ResponseCode.SUCCESS, FenceBrokerAnswer(log_end=end))
