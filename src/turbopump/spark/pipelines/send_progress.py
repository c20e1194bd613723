"""Watching topics grow while executors send: they cannot tell the driver before they are done."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from turbopump import supervisor
from turbopump.admin.administration import Admin
from turbopump.client.config import ClientConfig
from turbopump.client.session import Session
from turbopump.errors import TurbopumpError
from turbopump.spark.pipelines.progress import Step, Watch, unwatched
from turbopump.spark.shared_session import shared_session

_LOOK_S = 1.0


class SendProgress:
    """Tells, while the context lasts, how many messages topics have got since it began.

    Messages of others count too: it is for looking at, reports have the counts of the tasks.
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
            args=(supervisor.Watch(f"progress of {what}"), self._look, self._done),
            name="stored-since",
            daemon=True,
        )

    def __enter__(self) -> Self:
        if self._watch is not unwatched:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        if error is None:
            self._watch(Step(self._what, self._total, self._total))

    def _look(self) -> None:
        if self._before is None:
            self._before = self._stored()
        while not self._done.wait(_LOOK_S):
            grown = max(0, self._stored() - self._before)
            self._watch(Step(self._what, min(grown, self._total), self._total))

    def _stored(self) -> int:
        return shared_session(self._client).run(lambda session: _stored(session, self._topics))


async def _stored(session: Session, topics: Sequence[str]) -> int:
    admin = Admin(session=session)
    total = 0
    for topic in topics:
        try:
            status = await admin.topics.status(topic)
        except TurbopumpError:
            # Not there yet, or its broker is away for the moment: the tasks find out for sure.
            continue
        total += sum(each.max_offset for each in status.queues)
    return total
