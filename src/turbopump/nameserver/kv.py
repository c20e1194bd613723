"""Key-values by namespace, kept in a file: queues of ordered topics, and what operators like."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec

from turbopump.errors import InvalidArgument, StoreDamaged
from turbopump.machine.files import REAL_FILES, Files
from turbopump.store.config_files import load_json, save_json
from turbopump.tables import TableWriter

ORDER_NAMESPACE = "ORDER_TOPIC_CONFIG"
"""Its keys are topics, its values how many queues each broker has: ``broker-a:4;broker-b:4``."""

NAME_CHARS_MAX = 512
"""Of a namespace or a key."""

VALUE_CHARS_MAX = 64 * 1024
"""The order of a topic's queues, which is in all its routes, for some thousand brokers."""

TEXT_BYTES_MAX = 8 * 1024 * 1024
"""All of it together: every change writes the whole file, and an answer must fit into a frame."""

Table = Mapping[str, Mapping[str, str]]

_FILE_MEMBER = "configTable"


class KvConfig:
    """The key-values of one name server; a change counts once it is on disk."""

    def __init__(self, path: Path, writer: TableWriter, files: Files | None = None) -> None:
        self._path = path
        self._writer = writer
        self._files = files or REAL_FILES
        self._table: Table = {}
        # One change after the other, or a slow write could undo a later one.
        self._changing = asyncio.Lock()

    def load(self) -> None:
        """Read the file, or its backup; raises StoreDamaged when there is one but none is readable.

        Starting empty instead would overwrite at the next change what somebody might still save.
        """
        value = load_json(self._files, self._path)
        if value is None and self._has_content:
            raise StoreDamaged(f"{self._path} is not readable, and neither is its backup")
        try:
            self._table = msgspec.convert(
                {} if value is None else value[_FILE_MEMBER], dict[str, dict[str, str]]
            )
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            raise StoreDamaged(f"{self._path} does not hold key-values: {error}") from error

    @property
    def _has_content(self) -> bool:
        return self._files.exists(self._path) and self._files.file_size(self._path) > 0

    def value(self, namespace: str, key: str) -> str | None:
        """Return one value; None when there is none."""
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> Mapping[str, str] | None:
        """Return all of a namespace; None when it never had anything."""
        return self._table.get(namespace)

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value; raises InvalidArgument for what is too long."""
        for what, text, most in (
            ("namespace", namespace, NAME_CHARS_MAX),
            ("key", key, NAME_CHARS_MAX),
            ("value", value, VALUE_CHARS_MAX),
        ):
            if len(text) > most:
                raise InvalidArgument(f"{what} must be at most {most} characters, got {len(text)}")
        async with self._changing:
            entries = {**self._table.get(namespace, {}), key: value}
            await self._replace({**self._table, namespace: entries})

    async def delete(self, namespace: str, key: str) -> None:
        """Remove a value; its namespace stays, as it does in the original."""
        async with self._changing:
            if self.value(namespace, key) is not None:
                entries = {k: v for k, v in self._table[namespace].items() if k != key}
                await self._replace({**self._table, namespace: entries})

    async def _replace(self, table: Table) -> None:
        size = len(msgspec.json.encode(table))
        if size > TEXT_BYTES_MAX:
            raise InvalidArgument(f"key-values take {size} bytes: {TEXT_BYTES_MAX} are allowed")

        def adopt() -> None:
            self._table = table

        await self._writer.write(
            lambda: save_json(self._files, self._path, {_FILE_MEMBER: table}), adopt
        )
