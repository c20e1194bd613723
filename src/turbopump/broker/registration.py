"""Registering the broker with every name server, and unregistering it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from turbopump.broker.config import AccessConfig, BrokerConfig
from turbopump.broker.topics import Topics
from turbopump.errors import NetworkError, WireError
from turbopump.machine.timers import set_within
from turbopump.net.connection import Connection
from turbopump.net.pool import ConnectionPool
from turbopump.supervisor import Supervisor
from turbopump.timeouts import timeout
from turbopump.wire import headers
from turbopump.wire.bodies import (
    BrokerRegistration,
    DataVersion,
    KeyValues,
    TopicConfig,
    TopicConfigTable,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.hashing import body_crc
from turbopump.wire.registration import encode_compressed

_log = logging.getLogger(__name__)

RETRY_MS = 5000
"""Retry interval after a failed registration."""

ANNOUNCE_WAIT_MS = 3000
"""How long the caller waits for name servers after a topic change; tools wait 5 s in all."""

UNREGISTER_TIMEOUT_MS = 3000


class MasterAddress(Struct, frozen=True):
    """Where a slave finds its master, as a name server reports it."""

    address: str
    """Where clients connect to, and where tables are copied from."""
    ha_address: str
    """Where the log is copied from."""


OnMaster = Callable[[MasterAddress], None]


@dataclass(eq=False, kw_only=True)
class Registration:
    """Registers with all name servers: at the start, every 30 s, and whenever a topic changes.

    `start`, and `unregister` when the work is stopped. An unreachable name server blocks neither
    the broker nor the other name servers.
    """

    config: BrokerConfig
    topics: Topics
    pool: ConnectionPool
    address: str
    ha_address: str
    name_servers: Sequence[str]
    """Those to start with, see `use_name_servers`."""
    epoch: int = 0
    """The one it started with: a newer one that it learns of belongs to its successor."""

    def __post_init__(self) -> None:
        own = self.config.identity
        self._identity = headers.BrokerIdentity(
            broker_name=own.broker_name,
            broker_addr=self.address,
            cluster_name=own.cluster,
            broker_id=own.broker_id,
        )
        self._ordered: dict[str, frozenset[str]] = {}
        self._filter_servers: list[str] = []
        self.master: MasterAddress | None = None
        """A slave's master, as a name server reported it last; None until one has."""
        self._on_master: list[OnMaster] = []
        self._whole: tuple[DataVersion, BrokerConfig, bytes] | None = None
        """The last registration of all topics, and what it was built from."""
        self._links_by_server = {each: _NameServerLink(self, each) for each in self.name_servers}
        self._work: Supervisor | None = None
        """None before the start."""

    @property
    def _links(self) -> Sequence[_NameServerLink]:
        return tuple(self._links_by_server.values())

    def start(self, work: Supervisor) -> None:
        """Register with every name server now, and keep registering until stopped."""
        self._work = work
        for link in self._links:
            link.start(work)

    def use_name_servers(self, servers: Sequence[str]) -> None:
        """Register with these name servers from now on, and no longer with others."""
        for server in self._links_by_server.keys() - servers:
            self._links_by_server.pop(server).stop()
            self._ordered.pop(server, None)
        for server in servers:
            if server not in self._links_by_server:
                link = self._links_by_server[server] = _NameServerLink(self, server)
                if self._work is not None:
                    link.start(self._work)

    async def wait_tried(self) -> None:
        """Wait until registration with every name server was tried; failures are logged."""
        for link in self._links:
            await link.tried.wait()

    async def announce(self, topic: TopicConfig) -> None:
        """Register one changed topic and wait, up to a limit, until every name server has it."""
        announced = [link.announce_soon(topic) for link in self._links]
        if announced:
            await asyncio.wait(announced, timeout=ANNOUNCE_WAIT_MS / 1000)

    def topic_changed(self, topic: TopicConfig) -> None:
        """Register one changed topic soon, without waiting; a listener for `Topics.listen`."""
        for link in self._links:
            link.announce_soon(topic)

    def announce_all(self) -> None:
        """Register all topics soon, without waiting, after a change that affects all of them."""
        self.topics.renew_version()
        for link in self._links:
            link.announce_all_soon()

    def announce_filter_servers(self, addresses: list[str]) -> None:
        """Register the current filter servers soon, without waiting."""
        self._filter_servers, self._whole = addresses, None
        for link in self._links:
            link.announce_all_soon()

    def listen_to_master(self, on_master: OnMaster) -> None:
        """Call a function whenever a slave's master is reported at another address."""
        self._on_master.append(on_master)

    async def unregister(self) -> None:
        """Unregister from all name servers in parallel; failures are logged."""
        await asyncio.gather(*(link.unregister() for link in self._links))

    # --- for the links --------------------------------------------------------------------------

    @property
    def version(self) -> DataVersion:
        return self.topics.data_version

    @property
    def lacks_master(self) -> bool:
        """Whether this is a slave, and no name server has reported its master yet."""
        return self.config.identity.is_slave and self.master is None

    def command(self, changed: Iterable[str] | None) -> Command:
        """Return the registration of some topics or, with None, of all."""
        table = self.topics.table
        if changed is None:
            body = self._whole_body()
        else:
            body = self._body({name: table[name] for name in changed if name in table})
        header = headers.RegisterBroker(
            **asdict(self._identity),
            ha_server_addr=self.ha_address,
            compressed=self.config.registration.compressed,
            body_crc32=body_crc(body),
            broker_epoch=None if self.config.identity.is_slave else self.epoch or None,
        )
        return request(RequestCode.REGISTER_BROKER, header, body)

    def version_query(self) -> Command:
        """Return the request that asks whether a name server needs a new registration."""
        return request(RequestCode.QUERY_DATA_VERSION, self._identity, self.version.encode())

    def unregistration(self) -> Command:
        return request(RequestCode.UNREGISTER_BROKER, self._identity)

    def note_ordered(self, server: str, names: Iterable[str]) -> None:
        """Update which topics are ordered, from all name servers that say so."""
        self._ordered[server] = frozenset(names)
        self.topics.mark_ordered(frozenset().union(*self._ordered.values()))

    def note_master(self, answer: headers.RegisterBrokerAnswer) -> None:
        """Update the master's address, if a name server knows it.

        One that does not may have lost its table: the known address stays.
        """
        if not answer.master_addr or not answer.ha_server_addr:
            return
        master = MasterAddress(answer.master_addr, answer.ha_server_addr)
        if self.config.identity.is_slave and master != self.master:
            _log.info("master of this slave: %s, HA port %s", master.address, master.ha_address)
            self.master = master
            for on_master in self._on_master:
                on_master(master)

    def _whole_body(self) -> bytes:
        """Return the body with all topics; cached, as it is sent every 30 s and rarely changes."""
        version, config = self.version, self.config
        if self._whole is None or self._whole[0] != version or self._whole[1] is not config:
            self._whole = version, config, self._body(self.topics.table)
        return self._whole[2]

    def _body(self, topics: Mapping[str, TopicConfig]) -> bytes:
        table = TopicConfigTable(
            data_version=self.version,
            topic_config_table=permitted(topics, self.config.access),
        )
        body = BrokerRegistration(
            filter_server_list=self._filter_servers, topic_config_serialize_wrapper=table
        )
        if self.config.registration.compressed:
            return encode_compressed(body)
        return msgspec.json.encode(body)


def permitted(topics: Mapping[str, TopicConfig], access: AccessConfig) -> dict[str, TopicConfig]:
    """Return the topics as announced: what a broker forbids, it forbids in all of them."""
    if access.can_read and access.can_write:
        return dict(topics)
    return {
        name: TopicConfig(
            topic_name=name,
            read_queue_nums=topic.read_queue_nums,
            write_queue_nums=topic.write_queue_nums,
            perm=access.permission,
        )
        for name, topic in topics.items()
    }


class _NameServerLink:
    """Keeps one name server informed."""

    def __init__(self, registration: Registration, server: str) -> None:
        self._registration = registration
        self._pool = registration.pool
        self.server = server
        self.tried = asyncio.Event()
        """Set after the first attempt to register, successful or not."""
        self._announced: tuple[Connection, DataVersion] | None = None
        """The version the name server received last, and over which connection."""
        self._changed: dict[str, None] = {}
        self._news = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._is_reached: bool | None = None
        self._running: asyncio.Task[None] | None = None

    def start(self, work: Supervisor) -> None:
        self._running = work.keep(f"registration with {self.server}", self.run)

    def stop(self) -> None:
        """Stop registering; the name server forgets the broker when the connection closes."""
        if self._running is not None:
            self._running.cancel()
        self._release(self._waiting)

    def announce_soon(self, topic: TopicConfig) -> asyncio.Future[None]:
        """Register a changed topic soon; the future completes after the attempt."""
        self._changed[topic.topic_name] = None
        announced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(announced)
        self._news.set()
        return announced

    def announce_all_soon(self) -> None:
        self._announced = None
        self._news.set()

    async def run(self) -> None:
        # Immediately, also after an error: the name server's state is then unknown.
        await self.register()
        while True:
            config = self._registration.config.registration
            is_complete = self._is_reached and not self._registration.lacks_master
            pause_ms = config.interval_ms if is_complete else RETRY_MS
            is_news = await set_within(self._news, pause_ms)
            await self.register(only_if_changed=not is_news and not config.forced)

    async def register(self, *, only_if_changed: bool = False) -> None:
        """Try to register; failures are logged."""
        self._news.clear()
        waiting, self._waiting = self._waiting, []
        timeout_ms = self._registration.config.registration.timeout_ms
        try:
            async with timeout(timeout_ms / 1000):
                failure = await self._try(timeout_ms, only_if_changed)
        except TimeoutError:
            failure = f"no answer within {timeout_ms} ms"
        except (NetworkError, WireError) as error:
            failure = str(error)
        finally:
            self._release(waiting)
            self.tried.set()
        self._note(failure)

    def _release(self, waiting: Iterable[asyncio.Future[None]]) -> None:
        for announced in waiting:
            if not announced.done():
                announced.set_result(None)

    async def unregister(self) -> None:
        try:
            async with timeout(UNREGISTER_TIMEOUT_MS / 1000):
                connection = await self._pool.connection(self.server)
                await connection.request(self._registration.unregistration(), UNREGISTER_TIMEOUT_MS)
        except (NetworkError, TimeoutError) as error:
            _log.info("could not unregister from name server %s: %s", self.server, error)

    async def _try(self, timeout_ms: int, only_if_changed: bool) -> str | None:
        """Register; return why it did not work, or None."""
        connection = await self._pool.connection(self.server)
        if only_if_changed and await self._is_current(connection, timeout_ms):
            return None
        changed, self._changed = self._changed, {}
        version = self._registration.version
        command = self._registration.command(self._partial(connection, changed))
        self._announced = None
        answer = await connection.request(command, timeout_ms)
        if answer.code != ResponseCode.SUCCESS:
            return f"code {answer.code}: {answer.remark}"
        self._announced = connection, version
        header = headers.RegisterBrokerAnswer.from_ext_fields(answer.ext_fields)
        self._registration.note_master(header)
        body = whole_body(answer)
        if body:
            self._registration.note_ordered(self.server, KeyValues.decode(body).table)
        return None

    def _partial(self, connection: Connection, changed: dict[str, None]) -> Iterable[str] | None:
        """Return the topics to register; None for all.

        A part is enough only for a name server that knows the rest: it would take the version of
        the part for that of the whole, and skip the whole when it comes.
        """
        announced = self._announced
        knows_rest = (
            announced is not None
            and announced[0] is connection
            and announced[1].counter + len(changed) == self._registration.version.counter
        )
        return changed if changed and knows_rest else None

    async def _is_current(self, connection: Connection, timeout_ms: int) -> bool:
        answer = await connection.request(self._registration.version_query(), timeout_ms)
        if answer.code != ResponseCode.SUCCESS:
            return False
        return not headers.DataVersionAnswer.from_ext_fields(answer.ext_fields).changed

    def _note(self, failure: str | None) -> None:
        """Log only when a name server becomes reachable or unreachable."""
        if failure is None and self._is_reached is not True:
            _log.info("registered with name server %s", self.server)
        elif failure is not None and self._is_reached is not False:
            _log.warning(
                "cannot register with name server %s, retrying every %d s: %s",
                self.server,
                RETRY_MS // 1000,
                failure,
            )
        self._is_reached = failure is None
