"""Requests that end transactions, and the questions that producers are asked about them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

from turbopump.broker.clients import Member
from turbopump.broker.config import IdentityConfig
from turbopump.broker.handlers.common import Requests, commands_to, serves
from turbopump.broker.transactions.checks import Question
from turbopump.broker.transactions.endings import End
from turbopump.broker.transactions.transactions import Transactions
from turbopump.errors import RemoteError
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.net.connection import Connection
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import FLAG_ONEWAY, Command
from turbopump.wire.command import request as make_request
from turbopump.wire.headers import CheckTransactionState, EndTransaction, ResumeCheck
from turbopump.wire.ids import parse_offset_id
from turbopump.wire.sysflag import Transaction

_log = logging.getLogger(__name__)


class TransactionRequests(Requests):
    """Serves the requests that end transactions or have them checked again."""

    def __init__(self, identity: IdentityConfig, transactions: Transactions) -> None:
        self._identity = identity
        self._transactions = transactions

    @serves(RequestCode.END_TRANSACTION)
    def end(self, request: Command, peer: Connection) -> Awaitable[None] | None:
        """Commit or roll back; answered when that is stored. UNKNOWN never gets an answer."""
        try:
            header = EndTransaction.from_ext_fields(request.ext_fields)
            commits = self._decision(header)
            if commits is None:
                return None
            end = End(
                group=header.producer_group,
                queue_offset=QueueOffset(header.tran_state_table_offset),
                physical_offset=PhysicalOffset(header.commit_log_offset),
                commits=commits,
                message_id=header.msg_id,
            )
            later = self._transactions.end(end, _answer, request, peer)
            return None if later is None else _answer_later(later, request, peer)
        except RemoteError as error:
            _answer(error, request, peer)
            return None

    def _decision(self, header: EndTransaction) -> bool | None:
        """Return whether to commit; None if the producer does not know yet."""
        if self._identity.is_slave:
            remark = "a slave does not end transactions: ask the master"
            raise RemoteError(ResponseCode.SLAVE_NOT_AVAILABLE, remark)
        match header.commit_or_rollback:
            case Transaction.COMMIT:
                return True
            case Transaction.ROLLBACK:
                return False
            case Transaction.NONE:
                return None
            case other:
                remark = f"commitOrRollback must be 8 (commit), 12 (roll back) or 0, got {other}"
                raise RemoteError.system(remark)

    @serves(RequestCode.RESUME_CHECK_HALF_MESSAGE)
    async def resume(self, request: Command, _peer: Connection) -> Command:
        """Restart the checks of an abandoned half message."""
        header = ResumeCheck.from_ext_fields(request.ext_fields)
        _, position = parse_offset_id(header.msg_id)
        await self._transactions.resume(position)
        return request.answer(ResponseCode.SUCCESS)


def _answer(error: RemoteError | None, request: Command, peer: Connection) -> None:
    if error is None:
        peer.answer(request, request.answer(ResponseCode.SUCCESS))
        return
    if request.flag & FLAG_ONEWAY:
        _log.warning("could not end a transaction of %s: %s", peer.peer_address, error.remark)
    peer.answer(request, request.answer(error.code, remark=error.remark))


async def _answer_later(later: Awaitable[None], request: Command, peer: Connection) -> None:
    try:
        await later
    except RemoteError as error:
        _answer(error, request, peer)


def ask_producer(member: Member, question: Question) -> None:
    """Send a producer the request that asks what became of a transaction."""
    header = CheckTransactionState(
        tran_state_table_offset=question.queue_offset,
        commit_log_offset=question.physical_offset,
        msg_id=question.unique_key,
        transaction_id=question.unique_key,
        offset_msg_id=question.offset_id,
    )
    command = make_request(RequestCode.CHECK_TRANSACTION_STATE, header, question.message)
    commands_to(member.connection).oneway(command)
