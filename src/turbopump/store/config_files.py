"""Configuration files (topics, groups, offsets): small JSON texts, replaced as a whole.

Either the old or the new text is there at any moment, also after a power loss, and the one before
stays as ``.bak``.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from turbopump.errors import BodyError
from turbopump.machine.files import Files, make_directory_durable, read_file
from turbopump.wire import lenient_json
from turbopump.wire.schema import Body

_log = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)


def save_json(files: Files, path: Path, value: Any, *, bare_keys: bool = False) -> None:
    """Replace a file; ``bare_keys`` writes integer keys as the original does."""
    compact = lenient_json.dumps(value, bare_keys=bare_keys)
    text = compact if bare_keys else msgspec.json.format(compact, indent=4)
    save_text(files, path, text)


def save_text(files: Files, path: Path, text: str) -> None:
    """Replace a file: new text beside it, forced to disk; the old one becomes ``.bak``; rename."""
    if not files.exists(path.parent):
        make_directory_durable(files, path.parent)
    fresh, backup = _beside(path, ".tmp"), backup_of(path)
    try:
        _write_synced(files, fresh, text.encode())
    except OSError:
        # Half a text on a full disk takes up space that others need.
        files.remove(fresh)
        raise
    if files.exists(path):
        # A link, not a rename: at no moment may the file itself be missing.
        spare = _beside(path, ".bak.tmp")
        files.remove(spare)
        files.link(path, spare)
        files.rename(spare, backup)
    files.rename(fresh, path)
    files.sync_directory(path.parent)


def load_json(files: Files, path: Path) -> Any:
    """Read a file, or its backup if it is missing, empty or not JSON; None if neither can be."""
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


def backup_of(path: Path) -> Path:
    """Return where the text before the current one is kept."""
    return _beside(path, ".bak")


def load_table(files: Files, path: Path, kind: type[B]) -> B | None:
    """Read a file that holds one body; None when it cannot be read, which its owner reports."""
    value = load_json(files, path)
    try:
        return None if value is None else kind.from_value(value)
    except BodyError:
        return None


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _write_synced(files: Files, path: Path, data: bytes) -> None:
    fd = files.open_new(path)
    try:
        files.write(fd, data, 0)
        files.sync(fd)
    finally:
        files.close(fd)
