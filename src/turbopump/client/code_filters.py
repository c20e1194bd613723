"""Code filters: uploading them to filter servers, and pulling through those."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from turbopump.client import calls
from turbopump.client.routes import MASTER_ID
from turbopump.errors import NetworkError, NoRoute
from turbopump.filters.code import source_of
from turbopump.wire.bodies import Subscription
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Response
from turbopump.wire.prepared_requests import PullRequest

if TYPE_CHECKING:
    from turbopump.client.session import Session

_POLL_INTERVAL_MS = 200
_UPLOAD_TIMEOUT_MS = 20_000
"""Loading a filter starts a process, and may have to queue behind others."""

_Key = tuple[str, str, str, str]
"""Filter server, group, topic, name of the filter."""


class CodeFilters:
    """The filters that a session uploaded; uploads again what a filter server lacks."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._uploaded: set[_Key] = set()
        self._uploading: dict[_Key, asyncio.Future[None]] = {}

    async def check(self, group: str, wanted: Subscription) -> None:
        """Upload a filter to all filter servers of a topic's brokers.

        Raises NoRoute if a broker has none, and RemoteError if the filter is refused. A topic
        without a broker is not checked: its pulls report errors.
        """
        try:
            route = await self._session.route(wanted.topic)
        except NoRoute:
            return
        for broker in route.brokers:
            for address in await self._await_servers(wanted.topic, broker):
                await self._upload(address, group, wanted)

    async def request(
        self, group: str, wanted: Subscription, broker: str, command: PullRequest, timeout_ms: int
    ) -> Response:
        """Send a pull to a reachable filter server of a broker."""
        servers = self._servers(wanted.topic, broker)
        if not servers:
            await self._session.refresh_route(wanted.topic)
            servers = self._servers(wanted.topic, broker)
        failure: Exception = _no_server(broker)
        for address in self._session.random.sample(servers, len(servers)):
            try:
                return await self._request(address, group, wanted, command, timeout_ms)
            except NetworkError as error:
                self._forget(address)
                failure = error
        await self._session.refresh_route(wanted.topic)
        raise failure

    async def _request(
        self, address: str, group: str, wanted: Subscription, command: PullRequest, timeout_ms: int
    ) -> Response:
        await self._upload(address, group, wanted)
        answer = await self._session.request(address, command, timeout_ms)
        if answer.code == ResponseCode.FILTER_DATA_NOT_EXIST:
            # It restarted, or evicted the filter.
            self._forget(address)
            await self._upload(address, group, wanted)
            answer = await self._session.request(address, command, timeout_ms)
        return answer

    async def _upload(self, address: str, group: str, wanted: Subscription) -> None:
        key = (address, group, wanted.topic, wanted.sub_string)
        while key not in self._uploaded:
            # One upload at a time: the pulls of all queues notice together that it is missing.
            other = self._uploading.get(key)
            if other is not None:
                await asyncio.wait([other])
                continue
            done = self._uploading[key] = asyncio.get_running_loop().create_future()
            try:
                source = source_of(wanted.sub_string)
                await calls.upload_filter(
                    self._session, address, group, wanted, source, _UPLOAD_TIMEOUT_MS
                )
                self._uploaded.add(key)
            finally:
                del self._uploading[key]
                done.set_result(None)

    def _forget(self, address: str) -> None:
        self._uploaded = {key for key in self._uploaded if key[0] != address}

    async def _await_servers(self, topic: str, broker: str) -> Sequence[str]:
        """Return a broker's filter servers; wait for one that has just started."""
        clock = self._session.clock
        end_ms = clock.monotonic_ms() + self._session.config.request_timeout_ms
        while not (servers := self._servers(topic, broker)):
            if clock.monotonic_ms() >= end_ms:
                raise _no_server(broker)
            await asyncio.sleep(_POLL_INTERVAL_MS / 1000)
            await self._session.refresh_route(topic)
        return servers

    def _servers(self, topic: str, broker: str) -> Sequence[str]:
        """Return the filter servers of the master, or else of any slave."""
        route = self._session.cached_route(topic)
        if route is None:
            return ()
        addresses = route.brokers.get(broker, {})
        ordered = sorted(addresses, key=lambda broker_id: broker_id != MASTER_ID)
        found = (route.filter_servers.get(addresses[broker_id]) for broker_id in ordered)
        return next((servers for servers in found if servers), ())


def _no_server(broker: str) -> NoRoute:
    return NoRoute(
        f"broker {broker!r} has no filter server, which code filters need: set filterServerNums"
        " in its configuration, or subscribe with tags or Sql"
    )
