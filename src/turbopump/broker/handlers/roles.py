"""Requests that change which broker is master (91002, 91003), Turbopump's own."""

from __future__ import annotations

from turbopump.broker.config import Role
from turbopump.broker.handlers.common import Requests, as_remote_error, serves
from turbopump.broker.replication.role_changes import RoleChanges
from turbopump.broker.replication.roles import MASTER_ROLES
from turbopump.errors import RemoteError
from turbopump.net.connection import Connection
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.mastership import FenceBroker, FenceBrokerAnswer, PromoteBroker


class RoleRequests(Requests):
    """Serves operators that promote a slave, and brokers that were promoted."""

    def __init__(self, changes: RoleChanges) -> None:
        self._changes = changes

    @serves(RequestCode.PROMOTE_BROKER)
    async def promote(self, request: Command, _peer: Connection) -> Command:
        """Make a slave the master; the broker restarts after the answer."""
        header = PromoteBroker.from_ext_fields(request.ext_fields)
        role = header.broker_role
        if role not in MASTER_ROLES:
            text = f"brokerRole must be {' or '.join(MASTER_ROLES)}, got {role[:100]!r}"
            raise RemoteError.system(text)
        with as_remote_error():
            done = await self._changes.promote(Role(role), is_forced=bool(header.forced))
        return request.answer(ResponseCode.SUCCESS, done)

    @serves(RequestCode.FENCE_BROKER)
    async def fence(self, request: Command, _peer: Connection) -> Command:
        """Stop the writes of a master: another broker is being promoted."""
        header = FenceBroker.from_ext_fields(request.ext_fields)
        with as_remote_error():
            end = await self._changes.fence(header.claim)
        return request.answer(ResponseCode.SUCCESS, FenceBrokerAnswer(log_end=end))
