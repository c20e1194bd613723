"""The two send paths of a task: from its own thread, or through the session's event loop."""

from __future__ import annotations

from turbopump.spark.shared_session import SharedSession
from turbopump.spark.writing.blocking_sender import BlockingSender
from turbopump.spark.writing.retrying_sender import RetryingSender, SendCounts
from turbopump.spark.writing.row_converter import ConvertedRows
from turbopump.spark.writing.row_encoder import EncodedRows


class SendPaths:
    """Chooses the path for each batch of rows, and drains the other path before a change.

    So rows of a queue stay in order.
    """

    def __init__(
        self, shared: SharedSession, sending: RetryingSender, direct: BlockingSender
    ) -> None:
        self._shared = shared
        self._sending = sending
        self._direct = direct
        self._is_sending = False

    def take(self, rows: ConvertedRows | EncodedRows) -> None:
        """Send rows, waiting for room in the send window; raises if any send has failed."""
        if isinstance(rows, EncodedRows):
            self._leave_session()
            self._direct.take(rows)
        else:
            self._direct.finish()
            self._is_sending = True
            self._shared.run(lambda _: self._sending.take(rows))

    def finish(self) -> SendCounts:
        """Wait until all rows are stored; raises if any send has failed."""
        self._direct.finish()
        self._leave_session()
        return self._sending.counts

    def close(self) -> None:
        """Abandon pending sends and release the connections."""
        try:
            self._direct.close()
        finally:
            self._shared.run(lambda _: self._sending.close())

    def _leave_session(self) -> None:
        if self._is_sending:
            self._shared.run(lambda _: self._sending.finish())
            self._is_sending = False
