"""Consecutive requests of one chunk that differ only in some numbers, served together.

Nothing else happens between them, so the checks of the first one hold for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from turbopump.wire.command import Buffer
from turbopump.wire.frame_template import FrameTemplate, Numbers, VaryingFields
from turbopump.wire.framing import FrameDecoder

_log = logging.getLogger(__name__)

_MISSES_MAX = 6
"""After this many in a row, only one request of 64 is compared."""

ServeRow = Callable[[Iterator[Numbers], int], int]
"""Answers requests, given by their numbers, in order, up to a number of bytes of answers; returns
how many it answered."""


class RequestRow:
    """The row of requests that the last one began, if its handler said so."""

    __slots__ = ("_decoder", "_misses", "_skipped", "answer", "begun", "frame_bytes_max")

    def __init__(
        self,
        decoder: FrameDecoder,
        frame_bytes_max: int,
        answer: Callable[[Sequence[Buffer], int], None],
    ) -> None:
        self.frame_bytes_max = frame_bytes_max
        """Limit of answers; requests with longer ones must be left."""
        self.answer = answer
        """Sends the pieces of a number of encoded answers."""
        self._decoder = decoder
        self.begun: tuple[FrameTemplate, ServeRow] | None = None
        """How to recognise further requests of the row, and the function that serves them."""
        self._misses = 0
        self._skipped = 0

    @property
    def is_followed(self) -> bool:
        """Whether the next request may have the same layout as the one being served."""
        return self._decoder.is_followed

    def begin(self, varying: VaryingFields, serve: ServeRow) -> None:
        """Pass the requests behind the one being served to a function.

        They differ from it only in the varying numbers. Requests that the function does not answer
        are served as usual. Raises nothing: the one being served has its answer. Comparing costs a
        little; where there is never a row, it is done less and less often.
        """
        if self._skipped < 2**self._misses - 1:
            self._skipped += 1
            return
        self._misses = min(self._misses + 1, _MISSES_MAX)
        self._skipped = 0
        try:
            alike = self._decoder.alike(varying)
        except Exception:  # noqa: BLE001 - served as usual, they are answered at least
            _log.exception("requests were not compared")
            return
        if alike is not None:
            self.begun = alike, serve

    def end(self) -> None:
        """Serve the next request as usual."""
        self.begun = None

    def take(self, bytes_max: int) -> int:
        """Answer some requests and return how many; with 0 the row has ended."""
        assert self.begun is not None
        alike, serve = self.begun
        taken = 0
        try:
            taken = serve(self._decoder.row(alike), bytes_max)
        except Exception:  # noqa: BLE001 - served as usual, they are answered at least
            _log.exception("a row of requests was not served")
        self._decoder.pass_over(taken * alike.size)
        if taken:
            self._misses = 0
        else:
            self.end()
        return taken
