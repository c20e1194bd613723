"""Tables of servers and clients (topics, groups, offsets) and their files, written off the loop.

A file is replaced as a whole or not at all, and what it held before stays as ``.bak``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from turbopump.errors import BodyError, StoreDamaged, WriteFailed
from turbopump.machine.background import Background, Threads
from turbopump.machine.files import REAL_FILES, Files, read_file, read_text
from turbopump.machine.text_files import backup_of, save_text
from turbopump.machine.timers import set_within
from turbopump.supervisor import Supervisor
from turbopump.wire.schema import Body

B = TypeVar("B", bound=Body)
T = TypeVar("T")

_log = logging.getLogger(__name__)

_PAUSE_MS = 100
"""Between two writes of a table: changes that come together are written together."""
_RETRY_MS = 1000


def put_into(table: dict[str, T], changes: Mapping[str, T | None]) -> None:
    """Change some values of a table by their names; None removes one.

    In place: a copy for each change would take the longer, the more there is in the table.
    """
    for name, value in changes.items():
        if value is None:
            table.pop(name, None)
        else:
            table[name] = value


class TableWriter:
    """One worker that writes all files of a server, one after the other."""

    def __init__(self, background: Background | None = None) -> None:
        self.work = Supervisor()
        self._worker = (background or Threads()).worker("tables")

    async def write(
        self, action: Callable[[], None], then: Callable[[], None] | None = None
    ) -> None:
        """Write, and call ``then`` if that went well; raises what ``action`` raises.

        Once begun, both happen even if the caller is cancelled: its peer may be gone, but memory
        must not say anything else than the disk.
        """

        def follow(written: asyncio.Future[None]) -> None:
            if not written.cancelled() and written.exception() is None and then is not None:
                then()

        written = asyncio.wrap_future(self._worker.submit(action))
        written.add_done_callback(follow)
        await asyncio.shield(written)

    def close(self) -> None:
        """Wait for the current write, and refuse further ones."""
        self.work.cancel()
        self._worker.close()


class TableFile:
    """A file that holds one body; written as a whole, or not at all.

    ``is_indented`` makes it easy to read; not for JSON that only Java peers take for some.
    """

    def __init__(
        self,
        path: Path,
        files: Files | None = None,
        writer: TableWriter | None = None,
        *,
        is_indented: bool = True,
    ) -> None:
        self.path = path
        self._is_indented = is_indented
        self._files = files or REAL_FILES
        self.writer = writer or TableWriter()

    def load(self, kind: type[B]) -> B | None:
        """Read the body, from the backup if need be; None when there is neither.

        Raises StoreDamaged when there is something that cannot be read: going on without what it
        held would write over it.
        """
        try:
            found, fault = _read(self._files, self.path, kind)
        except BodyError as error:
            found, fault = None, f"is damaged ({error.reason})"
        if found is not None:
            return found
        backup = backup_of(self.path)
        try:
            spare, _ = _read(self._files, backup, kind)
        except BodyError:
            spare = None
        if spare is not None:
            _log.error("%s %s; using %s instead, which may be older", self.path, fault, backup)
            self._set_aside()
        elif fault.startswith("is damaged"):
            raise StoreDamaged(
                f"{self.path} {fault} and there is no usable backup: restore it from a copy,"
                " or remove it to continue without its contents"
            )
        elif fault != "is missing":
            _log.error("%s %s, and there is no usable backup", self.path, fault)
        return spare

    def load_expendable(self, kind: type[B], consequence: str) -> B | None:
        """Do the same for what clients restore by themselves: log damage and continue."""
        try:
            return self.load(kind)
        except (StoreDamaged, OSError) as error:
            _log.warning("%s: %s", consequence, error)
            return None

    def _set_aside(self) -> None:
        """Keep a file that could not be used, lest it becomes the next backup."""
        if self._files.exists(self.path):
            self._files.rename(self.path, self.path.with_name(self.path.name + ".damaged"))

    def save(self, body: bytes) -> None:
        """Replace the file, on disk when this returns; raises WriteFailed, the old one stays."""
        text = (msgspec.json.format(body, indent=4) if self._is_indented else body).decode()
        with _write_failures(self.path):
            save_text(self._files, self.path, text)


def change_text(
    files: Files, path: Path, change: Callable[[str], str], *, is_new: bool = False
) -> None:
    """Replace a text file by a changed one; raises WriteFailed, the old one stays.

    ``is_new`` lets the file begin with this change. Otherwise one that is missing is a failure:
    whatever else it held would be missing from a new one.
    """
    with _write_failures(path):
        text = "" if is_new and not files.exists(path) else read_text(files, path)
        save_text(files, path, change(text))


@contextmanager
def _write_failures(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteFailed(f"{path} could not be written: {error}") from error


def _read(files: Files, path: Path, kind: type[B]) -> tuple[B | None, str]:
    """Return what a file holds, or what is wrong with it; raises BodyError for what is damaged."""
    try:
        text = read_file(files, path)
    except FileNotFoundError:
        return None, "is missing"
    # No server ever writes an empty object.
    empty = text.strip() in (b"", b"{}")
    return (None, "is empty") if empty else (kind.decode(text), "")


class Table:
    """Keeps a file up to date with a table in memory, without holding up the event loop.

    ``encode`` returns the table as it is now. A write that fails is logged, once until it works
    again, and repeated: what is not on disk stays to be written.
    """

    def __init__(self, what: str, file: TableFile, encode: Callable[[], bytes]) -> None:
        self.what = what
        self.file = file
        self._encode = encode
        self.changes = 0
        """How often the table has changed."""
        self._saved_changes = 0
        self._writing = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        self._saver: asyncio.Task[None] | None = None
        self._has_failed = False
        self._news = asyncio.Event()

    @property
    def is_dirty(self) -> bool:
        """Whether anything changed that is not in the file."""
        return self.changes != self._saved_changes

    def save_soon(self) -> None:
        """Have what changed written within about 100 ms, and again until that works.

        Wakes the waiters for a change.
        """
        self.wake_waiters()
        if not self.is_dirty or not (self._saver is None or self._saver.done()):
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            # Before the start and after the end nothing runs that could write: `save_now` does.
            return
        name = f"writing of {self.what}"
        self._saver = self.file.writer.work.keep(name, self._save_until_clean)

    async def wait_changed(self, timeout_ms: int) -> bool:
        """Wait for the next change that is to be saved soon; whether it came in time."""
        # A new event for each change: waiters for an older one have been woken by it.
        if self._news.is_set():
            self._news = asyncio.Event()
        return await set_within(self._news, timeout_ms)

    def wake_waiters(self) -> None:
        """Wake all waiters for a change."""
        self._news.set()

    async def save(self) -> None:
        """Return when the table as it is now is on disk; raises WriteFailed.

        Callers during a write share the next one.
        """
        if not self.is_dirty:
            return
        if self._next is None:
            self._next = self.file.writer.work.start(self._write())
        await asyncio.shield(self._next)

    async def try_save(self) -> None:
        """Do the same, but log a failure."""
        try:
            await self.save()
        except WriteFailed as error:
            self._note_failure(error)

    def save_now(self) -> None:
        """Write what `save` has not written, before returning; for the end. Raises WriteFailed."""
        if self.is_dirty:
            changes = self.changes
            self.file.save(self._encode())
            self._note_saved(changes)

    def try_save_now(self) -> None:
        """Do the same, but log a failure; `save` tries again."""
        try:
            self.save_now()
        except WriteFailed as error:
            self._note_failure(error)

    async def _save_until_clean(self) -> None:
        while self.is_dirty:
            await self.try_save()
            await asyncio.sleep((_RETRY_MS if self._has_failed else _PAUSE_MS) / 1000)

    async def _write(self) -> None:
        async with self._writing:
            self._next = None
            changes, body = self.changes, self._encode()
            await self.file.writer.write(
                lambda: self.file.save(body), lambda: self._note_saved(changes)
            )

    def _note_saved(self, changes: int) -> None:
        self._saved_changes = changes
        if self._has_failed:
            _log.warning("%s are being saved again", self.what)
        self._has_failed = False

    def _note_failure(self, error: WriteFailed) -> None:
        if not self._has_failed:
            _log.error("%s cannot be saved until this is fixed: %s", self.what, error)
        self._has_failed = True
