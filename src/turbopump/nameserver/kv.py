"""Key-values by namespace, saved in a file: queues of ordered topics, and operators' own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from turbopump.errors import InvalidArgument
from turbopump.tables import TableFile, next_version
from turbopump.wire.schema import Body

ORDER_NAMESPACE = "ORDER_TOPIC_CONFIG"
"""Its keys are topics; a value has the number of queues by broker: ``broker-a:4;broker-b:4``."""

NAME_CHARS_MAX = 512
"""Of a namespace or a key."""

VALUE_CHARS_MAX = 64 * 1024
"""The order of a topic's queues, which is in all its routes, for some thousand brokers."""

TEXT_BYTES_MAX = 8 * 1024 * 1024
"""Of all key-values: every change writes the whole file, and an answer must fit into a frame."""

Table = Mapping[str, Mapping[str, str]]


class KvTable(Body, frozen=True, kw_only=True):
    """The file (kvConfig.json)."""

    config_table: dict[str, dict[str, str]]


class KvConfig:
    """The key-values of one name server; a change counts once it is on disk."""

    def __init__(self, file: TableFile) -> None:
        self._file = file
        self._table: Table = {}
        # One change at a time, or a slow write could undo a later one.
        self._changing = asyncio.Lock()

    def load(self) -> None:
        """Read the file, or its backup; raises StoreDamaged if it exists and cannot be read.

        Starting empty would overwrite at the next change what an operator could still recover.
        """
        saved = self._file.load(KvTable)
        self._table = {} if saved is None else saved.config_table

    def value(self, namespace: str, key: str) -> str | None:
        """Return one value; None when there is none."""
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> Mapping[str, str] | None:
        """Return the key-values of a namespace; None if it never had any."""
        return self._table.get(namespace)

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value; raises InvalidArgument if anything is too long."""
        _require_lengths(namespace, key, value)
        async with self._changing:
            await self._set(namespace, key, value)

    async def replace(self, namespace: str, key: str, expected: str | None, value: str) -> bool:
        """Set a value if the current one is the expected one, None for no value; else False."""
        _require_lengths(namespace, key, value)
        async with self._changing:
            if self.value(namespace, key) != expected:
                return False
            await self._set(namespace, key, value)
            return True

    async def _set(self, namespace: str, key: str, value: str) -> None:
        entries = {**self._table.get(namespace, {}), key: value}
        await self._replace({**self._table, namespace: entries})

    async def delete(self, namespace: str, key: str) -> None:
        """Remove a value; its namespace stays, as in Apache RocketMQ."""
        async with self._changing:
            if self.value(namespace, key) is not None:
                entries = {k: v for k, v in self._table[namespace].items() if k != key}
                await self._replace({**self._table, namespace: entries})

    async def _replace(self, table: Table) -> None:
        body = msgspec.json.encode({"configTable": table})
        if len(body) > TEXT_BYTES_MAX:
            raise InvalidArgument(
                f"key-values must take at most {TEXT_BYTES_MAX} bytes, got {len(body)}"
            )

        file = self._file
        version = next_version(file.version, file.writer.clock.now_ms())

        def adopt() -> None:
            self._table, file.version = table, version

        await file.writer.write(lambda: file.save(body, version), adopt)


def _require_lengths(namespace: str, key: str, value: str) -> None:
    for what, text, most in (
        ("namespace", namespace, NAME_CHARS_MAX),
        ("key", key, NAME_CHARS_MAX),
        ("value", value, VALUE_CHARS_MAX),
    ):
        if len(text) > most:
            raise InvalidArgument(f"{what} must be at most {most} characters, got {len(text)}")
