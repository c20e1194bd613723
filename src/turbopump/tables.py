"""Tables of servers and clients (topics, groups, offsets) and their files, written off the loop.

A file is replaced as a whole or not at all, and its previous content is kept as ``.bak``. It has a
version (``dataVersion``), as topics and groups have in Apache RocketMQ 4.9, and offsets and delays
in release 5; earlier releases ignore it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from turbopump.clock import SYSTEM_CLOCK, Clock
from turbopump.errors import BodyError, StoreDamaged, WriteFailed
from turbopump.machine.background import Background, Threads
from turbopump.machine.files import REAL_FILES, Files, read_file, read_text
from turbopump.machine.text_files import backup_of, save_text
from turbopump.machine.timers import set_within
from turbopump.supervisor import Supervisor
from turbopump.wire.bodies import DataVersion
from turbopump.wire.schema import Body, parsed

B = TypeVar("B", bound=Body)
T = TypeVar("T")

_log = logging.getLogger(__name__)

_PAUSE_MS = 100
"""Between two writes of a table, so that several changes share a write."""
_RETRY_MS = 1000


class TableWriter:
    """One worker that writes all files of a server, one after the other; ``clock`` dates them."""

    def __init__(self, background: Background | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.work = Supervisor()
        self.clock = clock
        self._worker = (background or Threads()).worker("tables")

    async def write(
        self, action: Callable[[], None], then: Callable[[], None] | None = None
    ) -> None:
        """Write, then call ``then`` on success; raises what ``action`` raises.

        Once begun, both happen even if the caller is cancelled: memory and disk must agree.
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
    """A file that holds one body and its version; written as a whole, or not at all.

    With ``is_verbatim``, the file is the body byte for byte: not indented, and without a version.
    """

    def __init__(
        self,
        path: Path,
        files: Files | None = None,
        writer: TableWriter | None = None,
        *,
        is_verbatim: bool = False,
    ) -> None:
        self.path = path
        self._is_verbatim = is_verbatim
        self._files = files or REAL_FILES
        self.writer = writer or TableWriter()
        self.version = DataVersion(timestamp=self.writer.clock.now_ms())
        """Of the loaded table, and of its changes since; a file without one begins with 0."""
        self.is_current = True
        """Whether `load` has found the last table that was saved, or that there is none."""

    def load(self, kind: type[B]) -> B | None:
        """Read the body, from the backup if necessary; None if there is neither.

        Raises StoreDamaged if the content cannot be read: continuing without it would overwrite it.
        """
        self.is_current = False
        try:
            found, fault = self._read(self.path, kind)
        except BodyError as error:
            found, fault = None, f"is damaged ({error.reason})"
        if found is not None:
            self.is_current = True
            return found
        backup = backup_of(self.path)
        try:
            spare, _ = self._read(backup, kind)
        except BodyError:
            spare = None
        if spare is not None:
            _log.error(
                "%s %s; using %s instead, which may be older: it has version %d of timestamp %d",
                self.path,
                fault,
                backup,
                self.version.counter,
                self.version.timestamp,
            )
            self._set_aside()
        elif fault.startswith("is damaged"):
            raise StoreDamaged(
                f"{self.path} {fault} and there is no usable backup: restore it from a copy,"
                " or remove it to continue without its contents"
            )
        elif fault == "is missing":
            self.is_current = True
        else:
            _log.error("%s %s, and there is no usable backup", self.path, fault)
        return spare

    def load_expendable(self, kind: type[B], consequence: str) -> B | None:
        """Do the same for state that clients restore by themselves: log damage and continue."""
        try:
            return self.load(kind)
        except (StoreDamaged, OSError) as error:
            _log.warning("%s: %s", consequence, error)
            return None

    def _set_aside(self) -> None:
        """Keep an unusable file under another name, so that it does not become the next backup."""
        if self._files.exists(self.path):
            aside = self.path.with_name(self.path.name + ".damaged")
            # A crash may have left it under both names: then a rename alone would do nothing.
            self._files.remove(aside)
            self._files.rename(self.path, aside)

    def save(self, body: bytes, version: DataVersion) -> None:
        """Replace the file durably; on WriteFailed, the old one stays."""
        if not self._is_verbatim:
            # The first member, as Apache RocketMQ writes it.
            body = b'{"dataVersion":%b,%b' % (msgspec.json.encode(version), body[1:])
            body = msgspec.json.format(body, indent=4)
        with _write_failures(self.path):
            save_text(self._files, self.path, body.decode())

    def _read(self, path: Path, kind: type[B]) -> tuple[B | None, str]:
        """Return a file's content, or what is wrong with it; raises BodyError if it is damaged."""
        try:
            text = read_file(self._files, path)
        except FileNotFoundError:
            return None, "is missing"
        # No server ever writes an empty object.
        if text.strip() in (b"", b"{}"):
            return None, "is empty"
        value = parsed(text)
        found = kind.from_value(value)
        self.version = _Versioned.from_value(value).data_version or self.version
        return found, ""


class _Versioned(Body, frozen=True, kw_only=True):
    data_version: DataVersion | None = None


def next_version(version: DataVersion, now_ms: int, changes: int = 1) -> DataVersion:
    """Return the version of a table after changes."""
    return DataVersion(counter=version.counter + changes, timestamp=now_ms)


def change_text(
    files: Files, path: Path, change: Callable[[str], str], *, is_new: bool = False
) -> None:
    """Replace a text file by a changed one; on WriteFailed, the old one stays.

    A missing file is created if ``is_new``. Otherwise it is a failure: a new one would lack the
    rest of its content. Settings have no version in their file, which people write too.
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


class Table:
    """Keeps a file up to date with a table in memory, without blocking the event loop.

    ``encode`` returns the current table without its version. A failed write is logged once, and
    retried until it succeeds.
    """

    def __init__(self, what: str, file: TableFile, encode: Callable[[], bytes]) -> None:
        self.what = what
        self.file = file
        self._encode = encode
        self.changes = 0
        """How often the table has changed."""
        self._saved_changes = self._dated_changes = 0
        self._writing = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        self._saver: asyncio.Task[None] | None = None
        self._has_failed = False
        self._news = asyncio.Event()

    @property
    def is_dirty(self) -> bool:
        """Whether anything changed that is not in the file."""
        return self.changes != self._saved_changes

    @property
    def version(self) -> DataVersion:
        """The version of the current table: changes get their timestamp when it is first read."""
        new, self._dated_changes = self.changes - self._dated_changes, self.changes
        if new:
            file = self.file
            file.version = next_version(file.version, file.writer.clock.now_ms(), new)
        return self.file.version

    def change_to(self, version: DataVersion) -> None:
        """Count a change that already has a version: the table of a master."""
        self.changes += 1
        self._dated_changes, self.file.version = self.changes, version

    def save_soon(self) -> None:
        """Write changes within about 100 ms, with retries; wakes the waiters for a change."""
        self.wake_waiters()
        if not self.is_dirty or not (self._saver is None or self._saver.done()):
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            # Before the start and after the end no loop runs: `save_now` writes.
            return
        name = f"writing of {self.what}"
        self._saver = self.file.writer.work.keep(name, self._save_until_clean)

    async def wait_changed(self, timeout_ms: int) -> bool:
        """Wait for the next `save_soon`; return whether it came in time."""
        # A new event for each change: waiters for an older one have been woken by it.
        if self._news.is_set():
            self._news = asyncio.Event()
        return await set_within(self._news, timeout_ms)

    def wake_waiters(self) -> None:
        """Wake all waiters for a change."""
        self._news.set()

    async def save(self) -> None:
        """Return when the current table is on disk; raises WriteFailed.

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
        """Write unsaved changes synchronously, at the end; raises WriteFailed."""
        if self.is_dirty:
            changes = self.changes
            self.file.save(self._encode(), self.version)
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
            changes, version, body = self.changes, self.version, self._encode()
            await self.file.writer.write(
                lambda: self.file.save(body, version), lambda: self._note_saved(changes)
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
