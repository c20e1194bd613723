"""One table of the broker in one JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from turbopump.errors import BodyError, StoreDamaged, WriteFailed
from turbopump.store.config_files import load_json, save_text
from turbopump.store.files import Files
from turbopump.wire.schema import Body

B = TypeVar("B", bound=Body)


class ConfigFile:
    """A file that holds one body; written as a whole, or not at all."""

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self._path = path
        self._files = files or Files()

    def load(self, kind: type[B]) -> B | None:
        """Read the body, from the backup if need be; None when nothing was ever saved.

        Raises StoreDamaged when there is a file that cannot be read: going on without what it held
        would write over it.
        """
        value = load_json(self._path)
        if value is None:
            if self._path.exists() and self._path.stat().st_size > 0:
                raise StoreDamaged(
                    f"{self._path} and its backup are not JSON: restore or remove it"
                )
            return None
        try:
            return kind.from_value(value)
        except BodyError as error:
            raise StoreDamaged(f"{self._path}: {error.reason}") from error

    def save(self, body: bytes) -> None:
        """Replace the file, on disk when this returns; raises WriteFailed, the old one stays."""
        text = msgspec.json.format(body, indent=4).decode()
        try:
            save_text(self._files, self._path, text)
        except OSError as error:
            raise WriteFailed(f"{self._path} could not be written: {error}") from error
