"""Pulls of one queue that come one behind the other, and want all there is: answered together."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from turbopump.broker.stats import Stats
from turbopump.errors import TurbopumpError
from turbopump.message import QueueOffset
from turbopump.net.request_row import RequestRow
from turbopump.store.config import ReadLimits
from turbopump.store.store import Store
from turbopump.store.stretch import Part, Stretch
from turbopump.wire.alike import Numbers
from turbopump.wire.command import Buffer
from turbopump.wire.headers import PullMessage
from turbopump.wire.pull_answers import PullAnswers

_log = logging.getLogger(__name__)

_HEADER_BYTES_MAX = 1024
"""More than the header of an answer with messages can have."""


class PullRow:
    """Answers pulls like one that has been answered with messages; the others are left over."""

    def __init__(
        self,
        store: Store,
        stats: Stats,
        row: RequestRow,
        header: PullMessage,
        limits: ReadLimits | None,
        answers: PullAnswers,
    ) -> None:
        self._store = store
        self._stats = stats
        self._row = row
        self._header = header
        self._limits = limits
        self._frame = answers.frame
        self._stretch: Stretch | None = None

    def serve(self, asked: Iterator[Numbers], bytes_max: int) -> int:
        """Answer pulls until there are so many bytes of messages; return how many they are."""
        topic, queue_id = self._header.topic, self._header.queue_id
        parts: list[Buffer] = []
        pulls = messages = size = 0
        body_bytes_max = self._row.frame_bytes_max - _HEADER_BYTES_MAX
        try:
            for offset, count_max, opaque in asked:
                found = self._read(offset, count_max)
                if found is None:
                    break
                stretch, (pieces, part_bytes, count) = found
                if part_bytes > body_bytes_max:
                    break
                low, high = stretch.min_offset, stretch.max_offset
                parts.append(self._frame(opaque, offset + count, low, high, part_bytes))
                parts += pieces
                pulls += 1
                messages += count
                size += part_bytes
                if size >= bytes_max:
                    break
        except (OSError, TurbopumpError) as error:
            # What is left over meets the same error, and answers with it.
            _log.debug("%s: %s", topic, error)
        if pulls:
            group = self._header.consumer_group
            self._stats.get(group, topic, queue_id, messages, size, pulls)
            self._row.answer(parts, pulls)
        return pulls

    def _read(self, offset: int, count_max: int) -> tuple[Stretch, Part] | None:
        """Read from the stretch that was read last, or else from one that begins here."""
        stretch = self._stretch
        if stretch is not None and (part := stretch.part(offset, count_max)) is not None:
            return stretch, part
        header, at = self._header, QueueOffset(offset)
        stretch = self._store.stretch(header.topic, header.queue_id, at, count_max, self._limits)
        self._stretch = stretch
        if stretch is None or (part := stretch.part(offset, count_max)) is None:
            return None
        return stretch, part
