"""The first stage: which queues this client gains and loses as its group changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from turbopump.client import calls
from turbopump.client.allocation import Strategy, allocated
from turbopump.client.concurrent_calls import gather_by_key
from turbopump.client.owned_queue import OwnedQueue
from turbopump.client.session import Session
from turbopump.errors import NoRoute, RemoteError, TurbopumpError
from turbopump.machine.timers import Repeated
from turbopump.message import MessageQueue
from turbopump.wire.names import RETRY_PREFIX

if TYPE_CHECKING:
    from turbopump.client.consumption import Consumption

_log = logging.getLogger(__name__)

INTERVAL_MS = 20_000
PULL_IDLE_MS_MAX = 120_000
"""A queue that was not pulled for this long is released and acquired again."""
SOON_MS = 500
"""The retry interval of a missing route, `SOON_MAX` times: a group's first heartbeat creates its
retry topic."""
SOON_MAX = 10


def changes(
    owned: Mapping[MessageQueue, int], wanted: Collection[MessageQueue], now_ms: int
) -> tuple[list[MessageQueue], list[MessageQueue]]:
    """Return the queues gained and lost, given the owned ones with their last pull times.

    A queue whose pulling has died is lost and gained in one step.
    """
    mine = set(wanted)
    lost = [
        queue
        for queue, pulled_ms in owned.items()
        if queue not in mine or now_ms - pulled_ms > PULL_IDLE_MS_MAX
    ]
    kept = owned.keys() - set(lost)
    return [queue for queue in wanted if queue not in kept], lost


class Rebalancer:
    """Keeps the owned queues equal to those that the strategy allocates to this client."""

    def __init__(
        self,
        session: Session,
        group: str,
        strategy: Strategy | None,
        topics: Callable[[], Collection[str]],
        owner: Consumption,
    ) -> None:
        self._session = session
        self._group = group
        self._strategy = strategy
        """None when broadcasting: every member has every queue."""
        self._topics = topics
        self._owner = owner
        self._wanted = asyncio.Event()
        self._balancing = asyncio.Lock()
        self._soon_left = SOON_MAX
        self._look_soon = False
        self._changed: set[str] = set()
        """The topics of which queues were gained or lost in this round."""
        self._members_at: dict[str, Sequence[str]] = {}
        """The group's members in this round, by address of the broker that reported them."""
        self._asking: dict[str, asyncio.Lock] = {}
        self._asked_at: dict[str, str] = {}
        """The address of the broker that was asked last, by topic."""

    def wake(self) -> None:
        """Balance soon; repeated calls until then count once."""
        self._wanted.set()

    async def run(self) -> None:
        """Balance when woken, and at an interval."""
        while True:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._pause_ms() / 1000, Repeated(self._wanted.set))
            try:
                await self._wanted.wait()
            finally:
                timer.cancel()
            await self.balance()

    def _pause_ms(self) -> int:
        if not self._look_soon or self._soon_left == 0:
            return INTERVAL_MS
        self._soon_left -= 1
        return SOON_MS

    async def balance(self) -> None:
        # Two concurrent rounds would both gain what neither owns yet.
        async with self._balancing:
            await self._balance()

    async def _balance(self) -> None:
        self._wanted.clear()
        self._look_soon = False
        self._members_at.clear()
        self._asking.clear()
        self._asked_at.clear()
        topics = set(self._topics())
        owned = self._owner.owned.values()
        await self._lose(
            [each for each in owned if each.is_leaving or each.queue.topic not in topics]
        )
        self._changed.clear()
        try:
            errors = await gather_by_key(sorted(topics), self._balance_topic)
        except asyncio.CancelledError:
            # No other member pulls what was gained so far.
            self._owner.begin_soon(self._changed)
            raise
        # Last, and with one heartbeat: a consumer that starts gets its first messages when all
        # topics are looked up.
        await self._owner.begin(self._changed)
        for error in filter(None, errors.values()):
            raise error

    async def _balance_topic(self, topic: str) -> Exception | None:
        """Gain and lose queues of a topic; return the error if it failed because of a bug."""
        try:
            await self._take_share(topic)
        except NoRoute as error:
            # It has no messages yet, or its broker has not registered it yet.
            is_retry = topic.startswith(RETRY_PREFIX)
            self._look_soon |= is_retry
            level = logging.DEBUG if is_retry else logging.WARNING
            _log.log(level, "%s is not consumed yet: %s", topic, error)
        except TurbopumpError as error:
            # Keep the owned queues: missing information is no reason to stop consuming.
            what, asked = "queues of %s for %s not balanced", self._asked_at.get(topic, "")
            self._session.warn(_log, asked, error, what, topic, self._group)
        except Exception as error:  # noqa: BLE001 - raised when the other topics are balanced
            return error
        return None

    async def _take_share(self, topic: str) -> None:
        wanted = await self._share(topic)
        if wanted is None:
            return
        table = self._owner.owned
        now_ms = self._session.clock.monotonic_ms()
        pulled = {
            queue: owned.pulled_ms(now_ms) for queue, owned in table.items() if queue.topic == topic
        }
        to_gain, to_lose = changes(pulled, wanted, now_ms)
        lost = await self._lose([table[queue] for queue in to_lose])
        # A queue that could not be released is still in the table and must not be gained twice.
        gained = await self._owner.gain([queue for queue in to_gain if queue not in table])
        if lost or gained:
            self._changed.add(topic)
            _log.info("%s in %s: gained %s, lost %s", self._group, topic, gained, lost)

    async def _lose(self, owned: Iterable[OwnedQueue]) -> list[OwnedQueue]:
        """Lose queues; return those that were released."""
        released = await gather_by_key(owned, self._owner.lose)
        return [each for each, is_released in released.items() if is_released]

    async def _share(self, topic: str) -> Collection[MessageQueue] | None:
        """Return this client's queues of a topic, or None if the group's members are unknown."""
        route = await self._session.route(topic)
        if self._strategy is None:
            return route.readable
        self._asked_at[topic] = self._session.any_address(route)
        members = await self._members(self._asked_at[topic])
        if not members or not route.readable:
            return None
        me = self._session.client_id
        try:
            share = allocated(self._strategy, route.readable, members, me)
        except Exception:  # noqa: BLE001 - perhaps the user's code; what is owned stays as it is
            _log.exception("the strategy of %s failed for %s", self._group, topic)
            return None
        return list(dict.fromkeys(queue for queue in share if queue.topic == topic))

    async def _members(self, address: str) -> Sequence[str]:
        """Ask a broker for the group's members, once for all topics of a round."""
        async with self._asking.setdefault(address, asyncio.Lock()):
            known = self._members_at.get(address)
            if known is None:
                known = await group_members(self._session, address, self._group)
                self._members_at[address] = known
            return known


async def group_members(session: Session, address: str, group: str) -> list[str]:
    """Return the client ids of a group's members, including this client's own if possible.

    A list without it means that the broker lost track of this client, and that the other members
    share its queues now or soon. So it sends a heartbeat and asks again. If the id is still
    missing, the list is returned unchanged: it gives this client no queues, since two owners of a
    queue are worse than none. Raises TurbopumpError if the broker does not respond: then no member
    is known to have taken over, and the caller keeps its queues until it can ask again.
    """
    timeout_ms = session.config.request_timeout_ms
    try:
        members = await calls.consumer_ids(session, address, group, timeout_ms)
    except RemoteError:
        # Brokers respond this way if a group has no members at all.
        members = []
    if session.client_id in members:
        return members
    await session.heartbeat_to(address)
    members = await calls.consumer_ids(session, address, group, timeout_ms)
    if session.client_id not in members:
        _log.warning(
            "%s does not list this client, %s, as a member of %s although it has just sent a"
            " heartbeat: it owns no queues until the list names it",
            address,
            session.client_id,
            group,
        )
    return members
