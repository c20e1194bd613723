"""Small text files that are replaced as a whole.

Either the old or the new text exists at any time, even after a power loss, and the previous one
stays as ``.bak``.
"""

from __future__ import annotations

from pathlib import Path

from turbopump.machine.files import Files, closing, make_directory_durable


def save_text(files: Files, path: Path, text: str) -> None:
    """Replace a file durably; the old one becomes ``.bak``."""
    if not files.exists(path):
        # A file that exists was created after its directory had become durable.
        make_directory_durable(files, path.parent)
    fresh, backup = _beside(path, ".tmp"), backup_of(path)
    try:
        _write_synced(files, fresh, text.encode())
    except OSError:
        # An incomplete file on a full disk takes up space that others need.
        files.remove(fresh)
        raise
    if files.exists(path):
        # A link, not a rename: the file must never be missing.
        spare = _beside(path, ".bak.tmp")
        files.remove(spare)
        files.link(path, spare)
        files.rename(spare, backup)
    files.rename(fresh, path)
    files.sync_directory(path.parent)


def backup_of(path: Path) -> Path:
    """Return the path of the backup, the previous text."""
    return _beside(path, ".bak")


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _write_synced(files: Files, path: Path, data: bytes) -> None:
    with closing(files, files.open_new(path)) as fd:
        files.write(fd, data, 0)
        files.sync(fd)
