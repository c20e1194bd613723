"""Configuration files of a store (topics, groups, offsets): small JSON files with backups."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from turbopump.errors import BodyError
from turbopump.machine.files import Files, read_file
from turbopump.machine.text_files import backup_of, save_text
from turbopump.wire import lenient_json
from turbopump.wire.schema import Body

_log = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)


def save_json(files: Files, path: Path, value: Any) -> None:
    """Replace a file durably."""
    save_text(files, path, msgspec.json.format(lenient_json.dumps(value), indent=4))


def load_json(files: Files, path: Path) -> Any:
    """Read a file, or its backup if it is missing, empty or not JSON; None if neither works."""
    for candidate in (path, backup_of(path)):
        try:
            text = read_file(files, candidate)
            if text.strip():
                return lenient_json.loads(text)
        except FileNotFoundError:
            continue
        except BodyError as error:
            _log.warning("%s cannot be read: %s", candidate, error)
    return None


def load_table(files: Files, path: Path, kind: type[B]) -> B | None:
    """Read a file that holds one body; None if it cannot be read, which the caller reports."""
    value = load_json(files, path)
    try:
        return None if value is None else kind.from_value(value)
    except BodyError:
        return None
