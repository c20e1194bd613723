"""Settings of brokers and name servers, and the key-values that name servers keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turbopump.admin.reach import BrokerNode, Reach, gathered
from turbopump.errors import InvalidArgument, NotThere, RemoteError
from turbopump.settings import parse_properties, render_properties
from turbopump.wire import headers
from turbopump.wire.bodies import KeyValues
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import whole_body


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One setting of one server, before and after; ``old`` is None where it had no value."""

    server: str
    key: str
    old: str | None
    new: str


class Configuration:
    """What can be done with settings.

    ::

        print((await admin.configuration.broker("broker-a"))["fileReservedTime"])
        await admin.configuration.change_brokers({"fileReservedTime": "48"})
    """

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    async def broker(self, broker: str) -> dict[str, str]:
        """Return all settings of a broker's master; raises NotThere."""
        (node,) = await self._reach.masters(broker=broker)
        return await self._of_broker(node)

    async def name_servers(self) -> dict[str, dict[str, str]]:
        """Return all settings of each name server, by its address."""
        answers = await self._reach.ask_every_nameserver(RequestCode.GET_NAMESRV_CONFIG)
        return {address: _settings(whole_body(answer)) for address, answer in answers.items()}

    async def change_brokers(
        self,
        settings: Mapping[str, str],
        *,
        broker: str | None = None,
        cluster: str | None = None,
        dry_run: bool = False,
    ) -> tuple[SettingChange, ...]:
        """Change settings while brokers run: of one, of a cluster or of all; return what changes.

        Raises InvalidArgument for a key that a broker does not have.
        """
        _require_some(settings)
        masters = await self._reach.masters(cluster, broker)
        known = await gathered(self._of_broker(node) for node in masters)
        changes = [
            change
            for node, current in zip(masters, known, strict=True)
            for change in _changes(node.broker, current, settings)
        ]
        if not dry_run:
            body = render_properties(settings).encode()
            await gathered(
                self._reach.ask(node, RequestCode.UPDATE_BROKER_CONFIG, body=body)
                for node in masters
            )
        return tuple(changes)

    async def change_name_servers(
        self, settings: Mapping[str, str], *, dry_run: bool = False
    ) -> tuple[SettingChange, ...]:
        """Change settings of all name servers while they run; return what changes."""
        _require_some(settings)
        changes = [
            change
            for address, current in (await self.name_servers()).items()
            for change in _changes(address, current, settings)
        ]
        if not dry_run:
            await self._reach.ask_every_nameserver(
                RequestCode.UPDATE_NAMESRV_CONFIG, body=render_properties(settings).encode()
            )
        return tuple(changes)

    # --- key-values -------------------------------------------------------------------------------

    async def key_values(self, namespace: str) -> dict[str, str]:
        """Return the key-values of a namespace; none when nobody has written any."""
        header = headers.KvNamespace(namespace=namespace)
        try:
            answer = await self._reach.ask_nameserver(RequestCode.GET_KVLIST_BY_NAMESPACE, header)
        except RemoteError as error:
            if error.code == ResponseCode.QUERY_NOT_FOUND:
                return {}
            raise
        return KeyValues.decode(whole_body(answer)).table

    async def key_value(self, namespace: str, key: str) -> str:
        """Return one value; raises NotThere."""
        header = headers.KvKey(namespace=namespace, key=key)
        try:
            answer = await self._reach.ask_nameserver(RequestCode.GET_KV_CONFIG, header)
        except RemoteError as error:
            if error.code != ResponseCode.QUERY_NOT_FOUND:
                raise
            raise NotThere("key", f"{namespace} {key}") from error
        return headers.KvValue.from_ext_fields(answer.ext_fields).value or ""

    async def put_key_value(self, namespace: str, key: str, value: str) -> None:
        """Write one value to all name servers."""
        for name, text in (("namespace", namespace), ("key", key)):
            if not text.strip():
                raise InvalidArgument(f"{name} is {text!r}: it must not be blank")
        entry = headers.KvEntry(namespace=namespace, key=key, value=value)
        await self._reach.ask_every_nameserver(RequestCode.PUT_KV_CONFIG, entry)

    async def delete_key_value(self, namespace: str, key: str) -> None:
        """Delete one value from all name servers; raises NotThere."""
        await self.key_value(namespace, key)
        header = headers.KvKey(namespace=namespace, key=key)
        await self._reach.ask_every_nameserver(RequestCode.DELETE_KV_CONFIG, header)

    async def _of_broker(self, node: BrokerNode) -> dict[str, str]:
        return _settings(whole_body(await self._reach.ask(node, RequestCode.GET_BROKER_CONFIG)))


def _settings(text: bytes) -> dict[str, str]:
    return parse_properties(text.decode("utf-8", "replace"))


def _require_some(settings: Mapping[str, str]) -> None:
    if not settings:
        raise InvalidArgument("no setting is given: key=value is allowed")


def _changes(
    server: str, current: Mapping[str, str], settings: Mapping[str, str]
) -> list[SettingChange]:
    return [
        SettingChange(server, key, current.get(key), value)
        for key, value in settings.items()
        if current.get(key) != value
    ]
