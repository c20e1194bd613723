"""Requests about access control, which this broker rejects: it has none."""

from __future__ import annotations

from turbopump.net.connection import Connection
from turbopump.net.router import Handler, not_supported
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command


def handlers() -> dict[int, Handler]:
    """Return handlers that reject the requests."""
    return {
        RequestCode.GET_BROKER_CLUSTER_ACL_INFO: not_supported,
        RequestCode.UPDATE_AND_CREATE_ACL_CONFIG: _rejecting(
            ResponseCode.UPDATE_AND_CREATE_ACL_CONFIG_FAILED
        ),
        RequestCode.DELETE_ACL_CONFIG: _rejecting(ResponseCode.DELETE_ACL_CONFIG_FAILED),
        RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: _rejecting(
            ResponseCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED
        ),
    }


def _rejecting(code: ResponseCode) -> Handler:
    def answer(request: Command, _peer: Connection) -> Command:
        return request.answer(code, remark="access control is not enabled on this broker")

    return answer
