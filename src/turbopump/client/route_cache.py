"""Cached routes: looked up when missing, kept up to date, with notification of changes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from random import Random
from typing import TypeVar

from turbopump.client.routes import MASTER_ID, Route, borrowed_route, route_of
from turbopump.errors import NetworkError, NoNameServer, NoRoute, NotRunning, RemoteError
from turbopump.net.name_server_list import NameServerList
from turbopump.supervisor import Supervisor
from turbopump.wire.bodies import TopicRoute
from turbopump.wire.codes import ResponseCode
from turbopump.wire.names import TEMPLATE_TOPIC

T = TypeVar("T")

_log = logging.getLogger(__name__)

AskRoute = Callable[[str, str], Awaitable[TopicRoute]]
"""Asks the name server at an address for a topic's route."""

OnChange = Callable[[Route], None]


class NameServers:
    """Equivalent name servers: one is used until it fails, then the next."""

    def __init__(self, servers: NameServerList, random: Random) -> None:
        self._servers = servers
        self._random = random
        self._known: tuple[str, ...] = ()
        self._order: deque[str] = deque()
        """The server in use goes first."""
        self._take(servers.current)

    async def ask(self, call: Callable[[str], Awaitable[T]]) -> T:
        """Call with the address of a server that responds; raises the last server's error."""
        self._take(await self._servers.addresses())
        for tries_left in reversed(range(len(self._order))):
            address = self._order[0]
            try:
                return await _from_name_server(call, address)
            except NetworkError as error:
                if self._order[0] == address:
                    self._order.rotate(-1)
                if not tries_left:
                    raise
                _log.info("name server %s: %s; asking the next one", address, error)
        raise AssertionError("there is at least one name server")

    def _take(self, addresses: tuple[str, ...]) -> None:
        if addresses != self._known:
            self._known = addresses
            used = self._order[0] if self._order else ""
            # Shuffled, or all clients would use the same one.
            shuffled = self._random.sample(addresses, len(addresses))
            self._order = deque(sorted(shuffled, key=lambda address: address != used))


async def _from_name_server(call: Callable[[str], Awaitable[T]], address: str) -> T:
    try:
        return await call(address)
    except RemoteError as error:
        raise not_a_name_server(address, error) or error from None


def not_a_name_server(address: str, error: RemoteError) -> NoNameServer | None:
    """Return the error of an address where no name server listens, or None."""
    if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        return None
    return NoNameServer(
        f"{address}: not a name server, perhaps a broker ({error.remark.strip()}); name servers"
        " listen at port 9876 by default"
    )


class RouteCache:
    """Routes by topic, and the addresses of the brokers in them."""

    def __init__(
        self, servers: NameServers, ask: AskRoute, tasks: Supervisor, on_change: OnChange
    ) -> None:
        self._servers = servers
        self._ask = ask
        self._tasks = tasks
        self._on_change = on_change
        self._routes: dict[str, Route] = {}
        self.cached: Callable[[str], Route | None] = self._routes.get
        """Returns the route of a topic without looking it up."""
        self._answers: dict[str, TopicRoute] = {}
        """The name server's answers that the routes were built from, except borrowed ones."""
        self.brokers: dict[str, Mapping[int, str]] = {}
        """The addresses of all known brokers, by name and broker id."""
        self._lookups: dict[str, asyncio.Task[TopicRoute | None]] = {}

    async def existing(self, topic: str) -> Route:
        """Return the route of a topic, looking it up if unknown; raises NoRoute."""
        route = self._routes.get(topic)
        if route is None or route.is_borrowed:
            await self.refresh(topic)
            route = self._routes.get(topic)
        if route is None or route.is_borrowed:
            raise NoRoute(f"topic {topic!r} is not known to the name servers")
        return route

    async def to_send(self, topic: str, queues_wanted: int) -> Route:
        """Return the route of a topic, or its template's if the broker may create the topic."""
        route = self._routes.get(topic)
        if route is not None and route.writable:
            return route
        if not await self.refresh(topic):
            template = await self._look_up(TEMPLATE_TOPIC)
            if template is not None:
                self._answers.pop(topic, None)
                self._take(borrowed_route(topic, template, queues_wanted))
        route = self._routes.get(topic)
        if route is None or not route.writable:
            raise NoRoute(
                f"topic {topic!r} has no queue to write to: no name server knows it, or none of "
                "its brokers takes messages"
            )
        return route

    async def refresh(self, topic: str) -> bool:
        """Look up a topic again; return whether it is known. Keep the old route if it is not."""
        return self._note(topic, await self._look_up(topic))

    def _note(self, topic: str, found: TopicRoute | None) -> bool:
        if found is not None:
            # The same object if the name server's answer has not changed.
            is_same = found is self._answers.get(topic)
            self._take(self._routes[topic] if is_same else route_of(topic, found))
            self._answers[topic] = found
        return found is not None

    async def refresh_all(self, topics: Iterable[str]) -> None:
        """Look up these and all cached topics again, one after another."""
        for topic in sorted({*topics, *self._routes}):
            try:
                # Callers that need a route look it up themselves, so this may end with its caller.
                self._note(topic, await self._found(topic))
            except NetworkError as error:
                _log.warning("routes not refreshed: %s", error)
                return
            except RemoteError as error:
                _log.warning("route of %s not refreshed: %s", topic, error)
        # Without brokers that are offline now.
        self.brokers = {
            name: addresses
            for route in self._routes.values()
            for name, addresses in route.brokers.items()
        }

    async def _look_up(self, topic: str) -> TopicRoute | None:
        """Look up a topic, sharing the lookup with concurrent callers."""
        lookup = self._lookups.get(topic)
        if lookup is None:
            lookup = self._lookups[topic] = self._tasks.start(self._found(topic))
            lookup.add_done_callback(lambda _: self._lookups.pop(topic, None))
        try:
            return await asyncio.shield(lookup)
        except asyncio.CancelledError:
            if lookup.cancelled():
                raise NotRunning("the client was closed while it looked for a route") from None
            raise

    async def _found(self, topic: str) -> TopicRoute | None:
        try:
            return await self._servers.ask(lambda address: self._ask(address, topic))
        except RemoteError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            return None

    def _take(self, route: Route) -> None:
        # The latest route goes last: where routes differ about a broker, it is right.
        known = self._routes.pop(route.topic, None)
        self._routes[route.topic] = route
        for name, addresses in route.brokers.items():
            _log_master(name, self.brokers.get(name, {}), addresses)
        self.brokers |= route.brokers
        if route == known:
            return
        _log.info(
            "topic %s: %d queues to write, %d to read, on %s",
            route.topic,
            len(route.writable),
            len(route.readable),
            ", ".join(route.brokers) or "no broker",
        )
        self._on_change(route)


def _log_master(broker: str, known: Mapping[int, str], found: Mapping[int, str]) -> None:
    """Log that a broker lost or regained its master."""
    if known and found and (MASTER_ID in known) != (MASTER_ID in found):
        if MASTER_ID in found:
            _log.info("broker %s has a master again: %s", broker, found[MASTER_ID])
        else:
            text = "broker %s has no master: consumers read from its slaves, offsets are committed"
            _log.warning(f"{text} and queues locked when it is back", broker)
