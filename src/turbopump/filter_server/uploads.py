"""The filters that consumers have uploaded, each with its process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from turbopump.clock import Clock
from turbopump.errors import RemoteError
from turbopump.filter_server.sandbox import FilterRefused, FilterStopped, Sandbox, Verdicts
from turbopump.filters.code import SOURCE_BYTES_MAX
from turbopump.filters.server_config import CodeLimits
from turbopump.wire.codes import ResponseCode
from turbopump.wire.hashing import body_crc
from turbopump.wire.headers import RegisterFilterClass
from turbopump.wire.names import TOPIC_CHARS_MAX, has_only_allowed_characters
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

STOPPED_MS = 60_000
"""How long a stopped filter is not run again."""
UNUSED_MS = 600_000
"""When a filter without pulls is removed."""
REPLACEABLE_MS = 60_000
"""When it may be removed to make room for another."""

_STARTS_AT_ONCE = 2
_NAME_CHARS_MAX = 255


class LoadedFilter:
    """One source for one group and topic; its process is restarted when it has ended."""

    def __init__(self, label: str, source: bytes, limits: CodeLimits, clock: Clock) -> None:
        self.label = label
        self.source = source
        self._limits = limits
        self._clock = clock
        self._starting = asyncio.Lock()
        self._stopped: tuple[str, int] | None = None
        """Why it was stopped, and when it may run again."""
        self.sandbox: Sandbox | None = None
        self.used_ms = clock.monotonic_ms()

    async def start(self) -> Sandbox:
        """Return the running process; raises RemoteError with what is wrong with the filter."""
        async with self._starting:
            self._require_not_stopped()
            if self.sandbox is None or not self.sandbox.is_running:
                try:
                    self.sandbox = await Sandbox.start(self.source, self._limits)
                except FilterRefused as error:
                    raise RemoteError.system(f"filter {self.label} was refused: {error}") from error
                except FilterStopped as error:
                    raise self._stop(error) from error
            return self.sandbox

    async def decide(self, messages: Sequence[MessageView]) -> Verdicts:
        """Return which messages match; raises RemoteError if the filter was stopped."""
        sandbox = await self.start()
        try:
            return await sandbox.decide(messages)
        except FilterStopped as error:
            raise self._stop(error) from error
        finally:
            self.used_ms = self._clock.monotonic_ms()

    @property
    def batch_count(self) -> int:
        """How many messages to pass in one batch."""
        return 1 if self.sandbox is None else self.sandbox.batch_count

    async def check_idle(self) -> None:
        """Stop the process if it uses CPU while idle."""
        if self.sandbox is not None:
            try:
                await self.sandbox.check_idle()
            except FilterStopped as error:
                self._stop(error)

    async def close(self) -> None:
        if self.sandbox is not None:
            await self.sandbox.close()

    def _require_not_stopped(self) -> None:
        if self._stopped is not None:
            reason, until_ms = self._stopped
            if self._clock.monotonic_ms() < until_ms:
                raise RemoteError.system(reason)
            self._stopped = None

    def _stop(self, error: FilterStopped) -> RemoteError:
        reason = f"filter {self.label} was stopped: {error}; it is tried again after"
        reason += f" {STOPPED_MS // 1000} s"
        if self._stopped is None:
            _log.warning("%s", reason)
            self._stopped = reason, self._clock.monotonic_ms() + STOPPED_MS
        return RemoteError.system(reason)


IsMember = Callable[[str, str], Awaitable[bool]]
"""Returns whether a group has a member at a client's address."""

_Key = tuple[str, str, str]
"""Group, topic and name of the filter."""


class Uploads:
    """Filters by group, topic and name; `close` ends all of their processes."""

    def __init__(self, limits: CodeLimits, is_member: IsMember, clock: Clock) -> None:
        self._limits = limits
        self._is_member = is_member
        self._clock = clock
        self._filters: dict[_Key, LoadedFilter] = {}
        self._latest: dict[tuple[str, str], str] = {}
        """The name uploaded last for a group and topic, for clients whose pulls name none."""
        self._failed: dict[_Key, LoadedFilter] = {}
        """Filters that failed to load; each knows how long it is not tried again."""
        self._starts = asyncio.Semaphore(_STARTS_AT_ONCE)

    async def take(self, header: RegisterFilterClass, source: bytes, client: str) -> None:
        """Run a source from now on; repeating the same one changes nothing. Raises RemoteError.

        Only a member of the group may replace a filter, or change which one is the latest: others
        depend on it.
        """
        _require_valid(header, source)
        key = (header.consumer_group, header.topic, header.class_name)
        async with self._starts:
            found = self._filters.get(key)
            is_known = found is not None and found.source == source
            if is_known and self._latest.get(key[:2]) == key[2]:
                may_replace = True
            else:
                may_replace = await self._is_member(header.consumer_group, client)
            if found is not None and is_known:
                await found.start()
            else:
                await self._replace(key, source, client, may_replace=may_replace)
            if may_replace or key[:2] not in self._latest:
                self._latest[key[:2]] = key[2]

    async def _replace(self, key: _Key, source: bytes, client: str, *, may_replace: bool) -> None:
        self._require_right(key, source, client, may_replace=may_replace)
        fresh = await self._started(key, source)
        try:
            # Again: another client may have uploaded one meanwhile.
            self._require_right(key, source, client, may_replace=may_replace)
        except RemoteError:
            await fresh.close()
            raise
        replaced = self._filters.pop(key, None)
        self._filters[key] = fresh
        if replaced is not None:
            await replaced.close()

    def _require_right(self, key: _Key, source: bytes, client: str, *, may_replace: bool) -> None:
        known = self._filters.get(key)
        if known is not None and known.source != source and not may_replace:
            group, topic, name = key
            raise RemoteError(
                ResponseCode.NO_PERMISSION,
                f"filter {name} of group {group} for topic {topic} can be replaced only by members"
                f" of the group, and none is at {client}: send a heartbeat to the broker first",
            )

    def find(self, group: str, topic: str, name: str | None) -> LoadedFilter:
        """Return a filter, by default the latest of a group and topic; raises RemoteError."""
        name = name or self._latest.get((group, topic), "")
        found = self._filters.get((group, topic, name))
        if found is None:
            raise RemoteError(
                ResponseCode.FILTER_DATA_NOT_EXIST,
                f"group {group} has uploaded no filter {name!r} for topic {topic}"
                " to this filter server: upload it with request 302",
            )
        return found

    async def check_idle(self) -> None:
        """Stop the processes that use CPU while idle."""
        for each in list(self._filters.values()):
            await each.check_idle()

    async def sweep(self) -> None:
        """Remove the filters that have long been unused."""
        await self._remove_unused(UNUSED_MS)

    async def close(self) -> None:
        await self._remove_unused(-1)

    async def _started(self, key: _Key, source: bytes) -> LoadedFilter:
        most = self._limits.filters_max
        if key not in self._filters and len(self._filters) >= most:
            await self._remove_unused(REPLACEABLE_MS)
            if len(self._filters) >= most:
                raise RemoteError.system(
                    f"the filter server runs {most} filters already: raise filterCodesMax"
                )
        group, topic, name = key
        label = f"{name} of group {group} for topic {topic}"
        fresh = self._failed.pop(key, None)
        if fresh is None or fresh.source != source:
            fresh = LoadedFilter(label, source, self._limits, self._clock)
        try:
            await fresh.start()
        except RemoteError:
            self._failed[key] = fresh
            if len(self._failed) > most:
                del self._failed[next(iter(self._failed))]
            raise
        return fresh

    async def _remove_unused(self, unused_ms: int) -> None:
        before_ms = self._clock.monotonic_ms() - unused_ms
        for key, each in list(self._filters.items()):
            if each.used_ms < before_ms:
                del self._filters[key]
                if self._latest.get(key[:2]) == key[2]:
                    del self._latest[key[:2]]
                await each.close()


def _require_valid(header: RegisterFilterClass, source: bytes) -> None:
    names = (
        ("consumerGroup", header.consumer_group, _NAME_CHARS_MAX),
        ("topic", header.topic, TOPIC_CHARS_MAX),
    )
    for field, name, most in names:
        ok = has_only_allowed_characters(name) and len(name) <= most
        _require(ok, f"{field} must be 1 to {most} of a-z A-Z 0-9 _-%|, got {name[:300]!r}")
    name, count = header.class_name, len(header.class_name)
    _require(name.isprintable(), f"className must have no control characters, got {name!r}")
    most = _NAME_CHARS_MAX
    _require(0 < count <= most, f"className must have 1 to {most} characters, got {count}")
    most, count = SOURCE_BYTES_MAX, len(source)
    _require(0 < count <= most, f"the source must have 1 to {most} bytes, got {count}")
    found, expected = header.class_crc, body_crc(source)
    _require(found == expected, f"classCRC must be that of the body, {expected}, got {found}")
    try:
        source.decode()
    except UnicodeDecodeError as error:
        raise RemoteError.system(f"the source must be UTF-8: {error}") from error


def _require(ok: bool, wrong: str) -> None:
    if not ok:
        raise RemoteError.system(wrong)
