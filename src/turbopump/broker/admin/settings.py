"""Reading and changing a broker's settings, and reading its runtime information."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from turbopump.broker.config_keys import REPORTED_KEYS, as_properties, blacklisted
from turbopump.broker.handlers.common import Requests, answer_with, as_remote_error, serves
from turbopump.broker.live_config import LiveConfig
from turbopump.errors import InvalidArgument, RemoteError
from turbopump.machine.process import processors
from turbopump.net.connection import Connection
from turbopump.net.router import not_supported
from turbopump.settings import Settings, parse_properties, render_properties
from turbopump.wire import headers
from turbopump.wire.bodies import KeyValues
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body

_REJECTED = {
    RequestCode.UPDATE_AND_CREATE_ACL_CONFIG: ResponseCode.UPDATE_AND_CREATE_ACL_CONFIG_FAILED,
    RequestCode.DELETE_ACL_CONFIG: ResponseCode.DELETE_ACL_CONFIG_FAILED,
    RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: (
        ResponseCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED
    ),
}
"""Changes of access control, which this broker does not have, and their answers."""


RuntimeTable = Callable[[], Awaitable[dict[str, str]]]


class SettingRequests(Requests):
    def __init__(self, live: LiveConfig, runtime_info: RuntimeTable) -> None:
        self._live = live
        self._runtime_info = runtime_info

    @serves(RequestCode.UPDATE_BROKER_CONFIG)
    async def change(self, request: Command, _peer: Connection) -> Command:
        """Change settings while the broker runs."""
        with as_remote_error():
            settings = _settings(whole_body(request))
            if blacklisted(self._live.current, settings):
                remark = "Can not update config in black list."
                raise RemoteError(ResponseCode.NO_PERMISSION, remark)
            await self._live.change(settings)
        return request.answer(ResponseCode.SUCCESS)

    @serves(RequestCode.GET_BROKER_CONFIG)
    def all(self, request: Command, _peer: Connection) -> Command:
        """Return all settings, and how often they were changed."""
        header = headers.ConfigVersion(version=self._live.version.encode().decode())
        texts = "false", self._live.stored_in, str(processors())
        reported = dict(zip(REPORTED_KEYS, texts, strict=True))
        body = render_properties({**as_properties(self._live.current), **reported}).encode()
        return request.answer(ResponseCode.SUCCESS, header, body=body)

    @serves(RequestCode.GET_BROKER_RUNTIME_INFO)
    async def runtime_info(self, request: Command, _peer: Connection) -> Command:
        return answer_with(request, KeyValues(table=await self._runtime_info()))

    @serves(RequestCode.GET_BROKER_CLUSTER_ACL_INFO)
    def access_control(self, request: Command, peer: Connection) -> Command:
        return not_supported(request, peer)

    @serves(*_REJECTED)
    def change_access_control(self, request: Command, _peer: Connection) -> Command:
        code = _REJECTED[RequestCode(request.code)]
        return request.answer(code, remark="access control is not enabled on this broker")


def _settings(text: bytes) -> Settings:
    try:
        return parse_properties(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"expected key=value lines: {error}") from error
