"""Queue locks on brokers, which orderly consumption requires."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable

from turbopump.client.calls import require_success
from turbopump.client.owned_queue import OwnedQueue
from turbopump.client.session import Session
from turbopump.errors import TurbopumpError
from turbopump.message import MessageQueue
from turbopump.wire.bodies import LockedQueues, LockQueues
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, request, whole_body

_log = logging.getLogger(__name__)

RENEW_INTERVAL_MS = 20_000
RENEW_FIRST_MS = 1000
UNLOCK_LATER_MS = 20_000
"""How long a lost queue stays locked while it has cached messages: a listener may have them."""

_LOCK_TIMEOUT_MS = 1000


class QueueLocks:
    """Acquires, renews and releases the queue locks of one group."""

    def __init__(self, session: Session, group: str) -> None:
        self._session = session
        self._group = group
        self._away: set[str] = set()
        """Brokers whose masters did not respond last time, or with an error."""

    async def lock(self, queues: Collection[MessageQueue]) -> frozenset[MessageQueue]:
        """Return the queues whose locks this client now holds; none of a broker that fails."""
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(self._lock_on(broker, of_broker))
                for broker, of_broker in _by_broker(queues).items()
            ]
        return frozenset(queue for task in asked for queue in task.result() or ())

    async def renew(self, owned: Collection[OwnedQueue]) -> None:
        """Renew the locks of owned queues, and note which are held."""
        by_queue = {each.queue: each for each in owned if not each.is_dropped}
        async with asyncio.TaskGroup() as group:
            for broker, queues in _by_broker(by_queue).items():
                group.create_task(self._renew_on(broker, [by_queue[queue] for queue in queues]))

    async def renew_one(self, owned: OwnedQueue) -> bool:
        """Renew one lock; return whether it is held."""
        await self.renew([owned])
        return owned.is_locked(self._session.clock.monotonic_ms())

    async def unlock(self, queues: Iterable[MessageQueue], *, is_oneway: bool = True) -> None:
        """Release locks; those of an unreachable broker expire."""
        for broker, of_broker in _by_broker(queues).items():
            try:
                address = self._session.address_to_write(broker)
                command = self._command(RequestCode.UNLOCK_BATCH_MQ, of_broker)
                if is_oneway:
                    await self._session.oneway(address, command, _LOCK_TIMEOUT_MS)
                else:
                    require_success(await self._session.request(address, command, _LOCK_TIMEOUT_MS))
            except TurbopumpError as error:
                _log.warning("locks of %s on %s not released: %s", self._group, broker, error)

    async def _renew_on(self, broker: str, owned: list[OwnedQueue]) -> None:
        locked = await self._lock_on(broker, [each.queue for each in owned])
        if locked is None:
            # An error is not a refusal: a lock is trusted as long as it was confirmed for.
            return
        now_ms = self._session.clock.monotonic_ms()
        for each in owned:
            if each.queue in locked:
                each.locked_ms = now_ms
            elif each.locked_ms is not None:
                each.locked_ms = None
                _log.warning("another client holds the lock of %s", each)

    async def _lock_on(
        self, broker: str, queues: list[MessageQueue]
    ) -> frozenset[MessageQueue] | None:
        """Return the locked queues, or None if the broker neither grants nor refuses locks."""
        try:
            address = self._session.address_to_write(broker)
            command = self._command(RequestCode.LOCK_BATCH_MQ, queues)
            answer = await self._session.request(address, command, _LOCK_TIMEOUT_MS)
            locked = LockedQueues.decode(whole_body(require_success(answer))).queues
        except TurbopumpError as error:
            level = logging.DEBUG if broker in self._away else logging.WARNING
            self._away.add(broker)
            text = "no locks for %s on %s: %s; without a lock, which only masters grant, its"
            text += " queues are not consumed in order"
            _log.log(level, text, self._group, broker, error)
            return None
        if broker in self._away:
            self._away.remove(broker)
            _log.info("%s grants locks for %s again", broker, self._group)
        return frozenset(locked)

    def _command(self, code: RequestCode, queues: list[MessageQueue]) -> Command:
        own_id = self._session.client_id
        body = LockQueues(client_id=own_id, consumer_group=self._group, queues=queues)
        return request(code, body=body.encode())


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    found: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        found.setdefault(queue.broker, []).append(queue)
    return found
