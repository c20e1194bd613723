"""Watching topics grow while executors send: they report to the driver only at the end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from turbopump import supervisor
from turbopump.admin.administration import Admin
from turbopump.client.config import ClientConfig
from turbopump.client.session import Session
from turbopump.errors import TurbopumpError
from turbopump.spark.pipelines.progress import Step, Watch, unwatched
from turbopump.spark.shared_session import shared_session

_POLL_INTERVAL_S = 1.0


class SendProgress:
    """Reports, within the context, how many messages topics have received since it began.

    Messages of other senders count too: it is for display; reports have the counts of the tasks.
    """

    def __init__(
        self, client: ClientConfig, topics: Sequence[str], what: str, total: int, watch: Watch
    ) -> None:
        self._client = client
        self._topics = topics
        self._what = what
        self._total = total
        self._watch = watch
        self._done = threading.Event()
        self._before: int | None = None
        self._thread = threading.Thread(
            target=supervisor.keep_in_thread,
            args=(supervisor.Watch(f"progress of {what}"), self._poll, self._done),
            name="stored-since",
            daemon=True,
        )

    def __enter__(self) -> Self:
        if self._watch is not unwatched:
            self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        if kind is None:
            self._watch(Step(self._what, self._total, self._total))

    def _poll(self) -> None:
        if self._before is None:
            self._before = self._stored()
        while not self._done.wait(_POLL_INTERVAL_S):
            grown = max(0, self._stored() - self._before)
            self._watch(Step(self._what, min(grown, self._total), self._total))

    def _stored(self) -> int:
        return shared_session(self._client).run(self._sum_of_ends)

    async def _sum_of_ends(self, session: Session) -> int:
        admin = Admin(session=session)
        total = 0
        for topic in self._topics:
            # It may not exist yet, or its broker is unavailable: the tasks determine which.
            with suppress(TurbopumpError):
                status = await admin.topics.status(topic)
                total += sum(each.max_offset for each in status.queues)
        return total
