"""The settings of a running broker, and changing them remotely."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from turbopump.broker.config import BrokerConfig
from turbopump.broker.config_keys import KEYS, updated
from turbopump.clock import Clock
from turbopump.machine.files import REAL_FILES, Files
from turbopump.settings import Settings, changed_properties, is_toml, parse_properties
from turbopump.tables import TableWriter, change_text, next_version
from turbopump.wire.bodies import DataVersion

_log = logging.getLogger(__name__)

_SECTION = "broker."
"""Precedes the keys of a broker in a file that configures several servers."""

OnConfigChange = Callable[[BrokerConfig, BrokerConfig], None]
"""Called with the configuration before a change, and after."""


@dataclass(eq=False)
class LiveConfig:
    """The current settings; a change counts once it is saved, if there is a file to save to."""

    current: BrokerConfig
    clock: Clock
    path: Path | None = None
    files: Files = REAL_FILES
    writer: TableWriter = field(default_factory=TableWriter)

    def __post_init__(self) -> None:
        self._changing = asyncio.Lock()
        self._listeners: list[OnConfigChange] = []
        self.version = DataVersion(counter=0, timestamp=self.clock.now_ms())

    @property
    def stored_in(self) -> str:
        """The file that keeps changes for the next start; empty if there is none."""
        return "" if self.path is None or is_toml(self.path) else str(self.path)

    def listen(self, listener: OnConfigChange) -> None:
        """Call a function after each change."""
        self._listeners.append(listener)

    async def change(self, settings: Settings) -> None:
        """Apply new values; raises InvalidArgument or WriteFailed, and then nothing has changed."""
        # One change at a time, or a later write could undo another.
        async with self._changing:
            fresh = updated(self.current, settings)
            if fresh == self.current:
                return
            known = {key: text for key, text in settings.items() if key in KEYS}
            if self.path is None or not self.stored_in:
                _log.info(
                    "%s: changed until the next restart; change the configuration file too",
                    ", ".join(known),
                )
                self._adopt(fresh)
            else:
                path, files = self.path, self.files
                await self.writer.write(
                    lambda: change_text(files, path, lambda text: _changed(text, known)),
                    lambda: self._adopt(fresh),
                )

    def _adopt(self, fresh: BrokerConfig) -> None:
        old, self.current = self.current, fresh
        self.version = next_version(self.version, self.clock.now_ms())
        for listener in self._listeners:
            listener(old, fresh)


def _changed(text: str, settings: Settings) -> str:
    """Return a file with new settings; it may configure others besides brokers."""
    known = parse_properties(text).keys()
    is_shared = any(key.startswith(_SECTION) for key in known)
    placed = {
        _SECTION + key if is_shared and key not in known else key: value
        for key, value in settings.items()
    }
    return changed_properties(text, placed)
