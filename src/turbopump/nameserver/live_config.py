"""The settings of a running name server, and changes to them by requests."""

from __future__ import annotations

import asyncio

from turbopump.errors import InvalidArgument, RemoteError
from turbopump.machine.files import REAL_FILES, Files
from turbopump.nameserver.config import LOCKED_KEYS, NameServerConfig
from turbopump.settings import Settings, changed_properties, configured, described, keys_of
from turbopump.tables import TableWriter, change_text
from turbopump.wire.codes import ResponseCode

CHANGEABLE_KEYS = frozenset({"orderMessageEnable"})
"""Settings that take effect immediately; the others are read when a name server starts."""


class LiveConfig:
    """The current settings; a change counts once it is written, if there is a file to write to."""

    def __init__(
        self, config: NameServerConfig, writer: TableWriter, files: Files | None = None
    ) -> None:
        self.current = config
        self._writer = writer
        self._files = files or REAL_FILES
        self._changing = asyncio.Lock()

    async def change(self, changes: Settings) -> None:
        """Apply new values; raises RemoteError if one cannot be changed, or is invalid."""
        _require_changeable(changes)
        async with self._changing:
            try:
                changed = configured(NameServerConfig, {**described(self.current), **changes})
            except InvalidArgument as error:
                raise RemoteError.system(str(error)) from error
            await self._replace(changed, changes)

    async def _replace(self, changed: NameServerConfig, changes: Settings) -> None:
        path = changed.config_store_path

        def adopt() -> None:
            self.current = changed

        if path is None:
            adopt()
        else:
            await self._writer.write(
                lambda: change_text(
                    self._files, path, lambda text: changed_properties(text, changes), is_new=True
                ),
                adopt,
            )


def _require_changeable(changes: Settings) -> None:
    for key in changes:
        if key in LOCKED_KEYS:
            raise RemoteError(
                ResponseCode.NO_PERMISSION,
                f"{key} cannot be changed remotely: edit the configuration file and restart",
            )
        if key not in keys_of(NameServerConfig):
            known = ", ".join(sorted(CHANGEABLE_KEYS))
            raise RemoteError.system(f"unknown setting {key}; expected one of {known}")
        if key not in CHANGEABLE_KEYS:
            remark = f"{key} is only read at the start: change it where the name server is started"
            raise RemoteError(ResponseCode.NO_PERMISSION, remark)
