"""Settings of brokers and name servers, and the key-values that name servers keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from turbopump.admin.servers import BrokerNode, Servers, gathered, no_slave, none_on
from turbopump.broker import config_keys
from turbopump.client.routes import MASTER_ID
from turbopump.errors import InvalidArgument, NotThere
from turbopump.settings import nearest_key, parse_properties, render_properties
from turbopump.wire import headers
from turbopump.wire.bodies import KeyValues
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import whole_body

_SIMILARITY = 0.7
"""Less similar keys share only an ending, as aclEnable and vipChannelEnable do."""

Server = BrokerNode | str
"""A broker process, or the address of a name server."""

_ByServer = Mapping[Server, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One setting of one server, before and after; ``old`` is None where it had no value."""

    server: str
    """The name of a broker, or the address of a name server."""

    broker_id: int | None
    """Which broker of that name, 0 for the master; None for a name server."""

    address: str
    key: str
    old: str | None
    new: str
    is_stored: bool | None = None
    """Whether it survives a restart; None where the server does not say."""


class Configuration:
    """What can be done with settings.

    ::

        print((await admin.configuration.broker("broker-a"))["fileReservedTime"])
        await admin.configuration.change_brokers({"fileReservedTime": "48"})
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    async def broker(self, broker: str, broker_id: int = MASTER_ID) -> dict[str, str]:
        """Return all settings of a broker's master, or of the slave with an id; raises NotThere."""
        (node,) = await self._nodes(broker=broker, broker_id=broker_id)
        return await self._of_broker(node)

    async def name_servers(self) -> dict[str, dict[str, str]]:
        """Return all settings of each name server, by its address."""
        answers = await self._servers.ask_every_nameserver(RequestCode.GET_NAMESRV_CONFIG)
        return {address: _settings(whole_body(answer)) for address, answer in answers.items()}

    async def change_brokers(
        self,
        settings: Mapping[str, str],
        *,
        broker: str | None = None,
        cluster: str | None = None,
        broker_id: int | None = MASTER_ID,
        dry_run: bool = False,
    ) -> tuple[SettingChange, ...]:
        """Change settings while brokers run: of one, of a cluster or of all; return what changes.

        That is on masters: slaves have settings of their own. ``broker_id`` chooses the slaves with
        this id, None masters and slaves.

        Raises InvalidArgument for a key that a broker does not have, before any is changed; and
        for a value that is not allowed, or a key that takes effect at start only, as far as that
        is known, which it is for our brokers. What changed is read back from the brokers.
        """
        _require_some(settings)
        nodes = await self._nodes(cluster, broker, broker_id)
        before = await self._of_brokers(nodes)
        for node in nodes:
            _require_known(_name_of(node), before[node], settings)
            _check_values(before[node], settings)
        if dry_run:
            return _happened(before, _changed(before, settings), settings)
        body = render_properties(settings).encode()
        await gathered(
            self._servers.ask(node, RequestCode.UPDATE_BROKER_CONFIG, body=body) for node in nodes
        )
        return _happened(before, await self._of_brokers(nodes), settings)

    async def change_name_servers(
        self, settings: Mapping[str, str], *, dry_run: bool = False
    ) -> tuple[SettingChange, ...]:
        """Change settings of all name servers while they run; return what changes.

        Raises InvalidArgument for a key that a name server does not have, before any is changed.
        """
        _require_some(settings)
        before = await self._of_name_servers()
        for address, current in before.items():
            _require_known(f"name server {address}", current, settings)
        if dry_run:
            return _happened(before, _changed(before, settings), settings)
        await self._servers.ask_every_nameserver(
            RequestCode.UPDATE_NAMESRV_CONFIG, body=render_properties(settings).encode()
        )
        return _happened(before, await self._of_name_servers(), settings)

    # --- key-values -------------------------------------------------------------------------------

    async def key_values(self, namespace: str) -> dict[str, str]:
        """Return the key-values of a namespace; empty if there are none."""
        header = headers.KvNamespace(namespace=namespace)
        asking = self._servers.ask_nameserver(RequestCode.GET_KVLIST_BY_NAMESPACE, header)
        answer = await none_on(ResponseCode.QUERY_NOT_FOUND, asking)
        return {} if answer is None else KeyValues.decode(whole_body(answer)).table

    async def key_value(self, namespace: str, key: str) -> str:
        """Return one value; raises NotThere."""
        value = await self._servers.key_value(namespace, key)
        if value is None:
            raise NotThere("key", f"{namespace} {key}")
        return value

    async def put_key_value(self, namespace: str, key: str, value: str) -> None:
        """Write one value to all name servers."""
        for name, text in (("namespace", namespace), ("key", key)):
            if not text.strip():
                raise InvalidArgument(f"{name} must not be blank, got {text!r}")
        entry = headers.KvEntry(namespace=namespace, key=key, value=value)
        await self._servers.ask_every_nameserver(RequestCode.PUT_KV_CONFIG, entry)

    async def delete_key_value(self, namespace: str, key: str) -> None:
        """Delete one value from all name servers; raises NotThere."""
        await self.key_value(namespace, key)
        header = headers.KvKey(namespace=namespace, key=key)
        await self._servers.ask_every_nameserver(RequestCode.DELETE_KV_CONFIG, header)

    async def _nodes(
        self,
        cluster: str | None = None,
        broker: str | None = None,
        broker_id: int | None = MASTER_ID,
    ) -> tuple[BrokerNode, ...]:
        if broker_id == MASTER_ID:
            return await self._servers.masters(cluster, broker)
        nodes = await self._servers.nodes(cluster, broker)
        found = tuple(node for node in nodes if broker_id in (None, node.broker_id))
        if not found:
            raise no_slave(broker, broker_id)
        return found

    async def _of_name_servers(self) -> dict[Server, dict[str, str]]:
        return dict((await self.name_servers()).items())

    async def _of_brokers(self, nodes: Sequence[BrokerNode]) -> dict[Server, dict[str, str]]:
        found = await gathered(self._of_broker(node) for node in nodes)
        return dict(zip(nodes, found, strict=True))

    async def _of_broker(self, node: BrokerNode) -> dict[str, str]:
        return _settings(whole_body(await self._servers.ask(node, RequestCode.GET_BROKER_CONFIG)))


def _settings(text: bytes) -> dict[str, str]:
    return parse_properties(text.decode("utf-8", "replace"))


def _name_of(node: BrokerNode) -> str:
    return f"broker {node.broker}" if node.is_master else f"slave {node.broker_id} of {node.broker}"


def _require_some(settings: Mapping[str, str]) -> None:
    if not settings:
        raise InvalidArgument("specify at least one setting as key=value")


def _require_known(server: str, current: Mapping[str, str], settings: Mapping[str, str]) -> None:
    """Refuse settings that a server does not have: most servers ignore them and report success."""
    for key in settings:
        if key not in current:
            raise unknown_setting(server, key, current)


def unknown_setting(server: str, key: str, known: Iterable[str]) -> InvalidArgument:
    """Return the error that a server does not have a setting, and why, or which one it has."""
    return InvalidArgument(f"{server} has no setting {key!r}{_why_unknown(key, known)}")


def _why_unknown(key: str, known: Iterable[str]) -> str:
    if key in config_keys.UNSUPPORTED:
        return ": not supported by Turbopump"
    if key in config_keys.WITHOUT_EFFECT:
        return ": no effect in Turbopump"
    similar = nearest_key(key, known, _SIMILARITY)
    return f"; did you mean {similar!r}?" if similar else ""


def _check_values(current: Mapping[str, str], settings: Mapping[str, str]) -> None:
    try:
        reported = config_keys.REPORTED_KEYS
        config = config_keys.parse({k: v for k, v in current.items() if k not in reported})
    except InvalidArgument:
        # Not one of ours: only itself knows what it allows.
        return
    config_keys.updated(config, settings)


def _changed(before: _ByServer, settings: Mapping[str, str]) -> _ByServer:
    return {server: {**current, **settings} for server, current in before.items()}


def _happened(
    before: _ByServer, after: _ByServer, keys: Iterable[str]
) -> tuple[SettingChange, ...]:
    return tuple(
        SettingChange(
            *_place(server), key, before[server].get(key), current[key], _is_stored(current)
        )
        for server, current in after.items()
        for key in keys
        if key in current and current[key] != before[server].get(key)
    )


def _place(server: Server) -> tuple[str, int | None, str]:
    if isinstance(server, BrokerNode):
        return server.broker, server.broker_id, server.address
    return server, None, server


def _is_stored(current: Mapping[str, str]) -> bool | None:
    path = current.get("brokerConfigPath", current.get("configStorePath"))
    return None if path is None else bool(path)
