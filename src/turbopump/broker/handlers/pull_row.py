"""Pulls of one queue that come one behind the other, and want all there is: answered together."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from turbopump.broker.pull_run import PullRun
from turbopump.errors import TurbopumpError
from turbopump.net.request_row import RequestRow
from turbopump.wire.command import Buffer
from turbopump.wire.frame_template import Numbers
from turbopump.wire.pull_response_frames import PullResponseFrames

_log = logging.getLogger(__name__)

_HEADER_BYTES_MAX = 1024
"""More than the header of an answer with messages can have."""


class PullRow:
    """Answers pulls like one that has been answered with messages; the others are left over.

    ``recent`` makes the answers with recent messages, ``old`` those for a reader far behind.
    """

    def __init__(
        self, run: PullRun, row: RequestRow, recent: PullResponseFrames, old: PullResponseFrames
    ) -> None:
        self._run = run
        self._row = row
        self._recent = recent.frame
        self._old = old.frame

    def serve(self, asked: Iterator[Numbers], bytes_max: int) -> int:
        """Answer pulls until there are so many bytes of messages; return how many they are."""
        read = self._run.read
        parts: list[Buffer] = []
        pulls = messages = size = 0
        body_bytes_max = self._row.frame_bytes_max - _HEADER_BYTES_MAX
        try:
            for offset, count_max, opaque in asked:
                found = read(offset, count_max)
                if found is None:
                    break
                stretch, (pieces, part_bytes, count) = found
                if part_bytes > body_bytes_max:
                    break
                low, high = stretch.min_offset, stretch.max_offset
                frame = self._recent if stretch.is_recent else self._old
                parts.append(frame(opaque, offset + count, low, high, part_bytes))
                parts += pieces
                pulls += 1
                messages += count
                size += part_bytes
                if size >= bytes_max:
                    break
        except (OSError, TurbopumpError) as error:
            # What is left over meets the same error, and answers with it.
            _log.debug("%s", error)
        if pulls:
            self._run.count(messages, size, pulls)
            self._row.answer(parts, pulls)
        return pulls
