"""The settings of a running broker, and changing them from afar."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from pathlib import Path

from turbopump.broker.config import BrokerConfig
from turbopump.broker.config_keys import KEYS, updated
from turbopump.broker.topics import next_version
from turbopump.clock import Clock
from turbopump.errors import WriteFailed
from turbopump.machine.files import REAL_FILES, Files, read_text
from turbopump.settings import Settings, changed_properties, is_toml, parse_properties
from turbopump.store.config_files import save_text
from turbopump.tables import TableWriter
from turbopump.wire.bodies import DataVersion

_log = logging.getLogger(__name__)

_SECTION = "broker."
"""Precedes the keys of a broker in a file that configures several servers."""

OnConfigChange = Callable[[BrokerConfig, BrokerConfig], None]
"""Told of the configuration before a change, and after."""


class LiveConfig:
    """The current settings; a change counts once it is written, if there is a file to write to."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        path: Path | None = None,
        files: Files | None = None,
        writer: TableWriter | None = None,
    ) -> None:
        self._current = config
        self._clock = clock
        self._path = path
        self._files = files or REAL_FILES
        self._writer = writer or TableWriter()
        self._changing = asyncio.Lock()
        self._listeners: list[OnConfigChange] = []
        self.version = DataVersion(counter=0, timestamp=clock.now_ms())

    @property
    def current(self) -> BrokerConfig:
        return self._current

    def listen(self, listener: OnConfigChange) -> None:
        """Call a function after each change."""
        self._listeners.append(listener)

    async def change(self, settings: Settings) -> None:
        """Take over new values; raises InvalidArgument, or WriteFailed, and nothing changed."""
        # One change after the other, or one that is written later could undo another.
        async with self._changing:
            fresh = updated(self._current, settings)
            if fresh == self._current:
                return
            known = {key: text for key, text in settings.items() if key in KEYS}
            if self._path is None or is_toml(self._path):
                _log.info("%s: changed until the next start only", ", ".join(known))
                self._adopt(fresh)
            else:
                write = functools.partial(_write, self._files, self._path, known)
                await self._writer.write(write, lambda: self._adopt(fresh))

    def _adopt(self, fresh: BrokerConfig) -> None:
        old, self._current = self._current, fresh
        self.version = next_version(self.version, self._clock.now_ms())
        for listener in self._listeners:
            listener(old, fresh)


def _write(files: Files, path: Path, settings: Settings) -> None:
    try:
        text = read_text(files, path)
        save_text(files, path, changed_properties(text, _placed(text, settings)))
    except OSError as error:
        raise WriteFailed(f"{path} could not be changed: {error}") from error


def _placed(text: str, settings: Settings) -> dict[str, str]:
    """Return the settings by their keys in a file, which may configure others besides brokers."""
    known = parse_properties(text).keys()
    is_shared = any(key.startswith(_SECTION) for key in known)
    return {
        _SECTION + key if is_shared and key not in known else key: value
        for key, value in settings.items()
    }
