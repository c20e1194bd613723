"""Requests of one chunk that repeat the one before them but for some numbers, served together.

Nothing else happens between them, so what held for the first of them holds for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from turbopump.wire.command import Buffer
from turbopump.wire.frame_template import FrameTemplate, Numbers, VaryingFields
from turbopump.wire.framing import FrameDecoder

_log = logging.getLogger(__name__)

_BEGUN_IN_VAIN_MAX = 6
"""After so many, one request of 64 is looked at closer."""

ServeRow = Callable[[Iterator[Numbers], int], int]
"""Answers requests, given by their numbers, in their order, until there are so many bytes of
answers; returns how many requests these are."""


class RequestRow:
    """The row that the last request began, if its handler said so."""

    __slots__ = ("_begun_in_vain", "_decoder", "_passed_over", "answer", "begun", "frame_bytes_max")

    def __init__(
        self,
        decoder: FrameDecoder,
        frame_bytes_max: int,
        answer: Callable[[Sequence[Buffer], int], None],
    ) -> None:
        self.frame_bytes_max = frame_bytes_max
        """Of answers; requests with longer ones are to be left over."""
        self.answer = answer
        """Sends the pieces of so many answers, which are encoded already."""
        self._decoder = decoder
        self.begun: tuple[FrameTemplate, ServeRow] | None = None
        """How requests are recognised that go on with a row, and who serves them."""
        self._begun_in_vain = 0
        self._passed_over = 0

    @property
    def is_followed(self) -> bool:
        """Whether a request has come that may be like the one being served."""
        return self._decoder.is_followed

    def begin(self, varying: VaryingFields, serve: ServeRow) -> None:
        """Have requests behind the one being served handed to a function.

        They are like it but for the numbers that vary. What is left over, because the function does
        not answer it, goes the usual way. Nothing is raised: the one being served has its answer.
        Looking closer costs a little; where there never is a row, it is done more and more rarely.
        """
        if self._passed_over < 2**self._begun_in_vain - 1:
            self._passed_over += 1
            return
        self._begun_in_vain = min(self._begun_in_vain + 1, _BEGUN_IN_VAIN_MAX)
        self._passed_over = 0
        try:
            alike = self._decoder.alike(varying)
        except Exception:  # noqa: BLE001 - served the usual way, they are answered at least
            _log.exception("requests were not compared")
            return
        if alike is not None:
            self.begun = alike, serve

    def end(self) -> None:
        """Have the next request served the usual way."""
        self.begun = None

    def take(self, bytes_max: int) -> int:
        """Have some requests answered; return how many. With none of them the row has ended."""
        assert self.begun is not None
        alike, serve = self.begun
        taken = 0
        try:
            taken = serve(self._decoder.row(alike), bytes_max)
        except Exception:  # noqa: BLE001 - served the usual way, they are answered at least
            _log.exception("a row of requests was not served")
        self._decoder.pass_over(taken * alike.size)
        if taken:
            self._begun_in_vain = 0
        else:
            self.end()
        return taken
