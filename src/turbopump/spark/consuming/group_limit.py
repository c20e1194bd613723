"""How often a group's messages are redelivered, as its brokers say; asked by executors."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from turbopump.admin.administration import Admin
from turbopump.client.config import ClientConfig
from turbopump.client.retry_sender import USUAL_ATTEMPTS_MAX
from turbopump.client.session import Session
from turbopump.errors import TurbopumpError
from turbopump.spark.shared_session import shared_session

_log = logging.getLogger(__name__)

_VALID_S = 60.0


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """Returns the limit of a group; asks its brokers once a minute and process."""

    client: ClientConfig
    group: str
    """As brokers know it, with its namespace."""

    def __call__(self) -> int:
        known = _known.get(self)
        if known is None or time.monotonic() - known[1] > _VALID_S:
            limit = shared_session(self.client).run(self.read)
            known = _known[self] = limit, time.monotonic()
        return known[0]

    async def read(self, session: Session) -> int:
        """Ask the brokers; where they differ, the highest limit counts."""
        try:
            async with Admin(session=session) as admin:
                found = await admin.groups.settings(self.group)
        except TurbopumpError as error:
            _log.warning(
                "limit of group %s is unknown, %d assumed: %s",
                self.group,
                USUAL_ATTEMPTS_MAX,
                error,
            )
            found = {}
        limits = [settings.retries_max for settings in found.values()]
        return max(limits, default=USUAL_ATTEMPTS_MAX)


_known: dict[GroupLimit, tuple[int, float]] = {}
"""Limits, and when they were read; a process serves few groups."""
