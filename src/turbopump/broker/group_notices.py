"""Notices to the members of groups that have changed: one for many changes, some in each turn.

Each member answers a notice with a request for the list of all members. A notice to all for each of
a thousand members that reconnect would be a million notices, and as many lists.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from msgspec import Struct

from turbopump.broker.clients import Peer
from turbopump.net.deadlines import Deadlines

NOTIFIED_PER_TURN = 64

Members = Callable[[str], Iterable[Peer]]
"""Returns the clients to notify of a group's changes, as of now."""

Notify = Callable[[str, Iterable[Peer]], None]
"""Notifies clients that the members or topics of a group have changed."""


class _Round(Struct):
    """Notices of all changes of a group until the first of them is sent."""

    group: str
    left: deque[Peer] | None = None
    """The clients to notify; None before the round has begun."""
    count: int = 0


class GroupNotices:
    """Notifies a group's members in rounds.

    The first change is reported in the next turn of the event loop. Those that come during a round
    start the next one, which begins when the group's members may be notified again.
    """

    def __init__(
        self, deadlines: Deadlines, members: Members, notify: Notify, per_s: Callable[[], int]
    ) -> None:
        self._deadlines = deadlines
        self._members = members
        self._notify = notify
        self._per_s = per_s
        """Most notices per second to the members of one group."""
        self._rounds: deque[_Round] = deque()
        self._changed: dict[str, bool] = {}
        """The groups with a round, or a pause after it: whether they changed since it began."""
        self._is_scheduled = False

    def group_changed(self, group: str) -> None:
        """Notify a group's members soon, once for all changes until then."""
        if group not in self._changed:
            self._rounds.append(_Round(group))
            self._send_soon()
        self._changed[group] = True

    def _send_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        """Send a limited number of notices, the oldest round's first."""
        self._is_scheduled = False
        room = NOTIFIED_PER_TURN
        while self._rounds and room > 0:
            room -= self._continue(self._rounds[0], room)
        if self._rounds:
            self._send_soon()

    def _continue(self, current: _Round, room: int) -> int:
        """Send notices of a round; return how much of the turn's room they took."""
        group = current.group
        if current.left is None:
            self._changed[group] = False
            current.left = deque(self._members(group))
            current.count = len(current.left)
        part = [current.left.popleft() for _ in range(min(room, len(current.left)))]
        if not current.left:
            self._rounds.popleft()
            pause_ms = current.count * 1000 // self._per_s()
            self._deadlines.add(pause_ms, lambda: self._end_pause(group))
        self._notify(group, part)
        return max(1, len(part))

    def _end_pause(self, group: str) -> None:
        if self._changed.pop(group):
            self.group_changed(group)
