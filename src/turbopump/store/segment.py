"""One open file of the commit log: written at the end, mapped for reading.

Writing through a map would turn a full disk into a fatal signal; reading through one passes bytes
to the network without copying them. Both see the same page cache. (ADR 0005)
"""

from __future__ import annotations

import numpy as np

from turbopump.machine.files import Files, erase_from

COPIED_AT_ONCE = 1024 * 1024


class Segment:
    """An open file. Views into it stay valid after it is closed or deleted."""

    __slots__ = ("_address", "_files", "fd", "is_writable", "mapped", "size", "start")

    def __init__(
        self, start: int, size: int, files: Files, fd: int, *, is_writable: bool = True
    ) -> None:
        self.start = start
        self.size = size
        self._files = files
        self.fd = fd
        self._address = 0
        self.is_writable = is_writable
        """Whether it is open for writing, not for reading only."""
        self.mapped: memoryview | None = None
        """The whole file for reading; None before the first read."""

    def write(self, data: bytes | bytearray | memoryview, at: int) -> None:
        """Write at a position of the whole log."""
        assert self.start <= at <= self.start + self.size - len(data)
        self._files.write(self.fd, data, at - self.start)

    def view(self) -> memoryview:
        """Return the whole file for reading."""
        view = self.mapped
        if view is None:
            # The map is never closed explicitly: it is freed with the last view into it, so a
            # reader that still sends a message of a deleted file gets no error.
            view = self.mapped = memoryview(self._files.map(self.fd, self.size))
        return view

    def is_in_memory(self, at: int, size: int) -> bool:
        """Whether a part of the mapped file can be read without waiting for the disk."""
        assert self.mapped is not None
        if not self._address:
            self._address = np.frombuffer(self.mapped, np.uint8).ctypes.data
        return self._files.is_in_memory(self.fd, at - self.start, size, self._address)

    def data_end(self, at: int) -> int:
        """Return where the data around a position of the log ends, or that position in a hole."""
        first = at - self.start
        begin, end = next(self._files.data_ranges(self.fd, first, self.size), (self.size, 0))
        return self.start + end if begin <= first else at

    def used_bytes_after(self, at: int) -> int:
        """Count the bytes from a position of the log to the last one that is not zero."""
        first, view = at - self.start, self.view()
        for begin, end in reversed(list(self._files.data_ranges(self.fd, first, self.size))):
            for part in reversed(range(begin, end, COPIED_AT_ONCE)):
                used = bytes(view[part : min(part + COPIED_AT_ONCE, end)]).rstrip(b"\0")
                if used:
                    return part + len(used) - first
        return 0

    def erase_from(self, at: int) -> None:
        """Overwrite everything from a position of the log on with zeros."""
        erase_from(self._files, self.fd, at - self.start, self.size)

    def sync(self) -> None:
        """Return once all written bytes are on disk."""
        self._files.sync(self.fd)

    def close(self) -> None:
        """Close the file; views stay valid."""
        self.mapped = None
        if self.fd >= 0:
            self._files.close(self.fd)
            self.fd = -1
