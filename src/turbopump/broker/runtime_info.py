"""A broker's runtime information, with the keys that operators' tools expect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from turbopump.broker.config import BrokerConfig
from turbopump.broker.put_times import PutTimes
from turbopump.broker.searches import Searches
from turbopump.broker.stats import Rates, Stats
from turbopump.clock import Clock
from turbopump.core import CORE_NAME, read_entry
from turbopump.errors import DiskFailed
from turbopump.machine.files import REAL_FILES, Files
from turbopump.store.store import Store
from turbopump.supervisor import Watch, summary
from turbopump.version import __version__
from turbopump.wire.bodies import DelayOffsets
from turbopump.wire.codes import VERSION
from turbopump.wire.names import SCHEDULE_TOPIC

_VERSION_NAME = "V4_9_8"
_NO_TIME = "-1"
_DAYS = ("YesterdayMorning", "TodayMorning", "TodayNow")
_GIB = 1024**3

_CONSTANT = {
    "getMessageEntireTimeMax": "0",
    "putLatency99": "0.00",
    "putLatency999": "0.00",
    "dispatchMaxBuffer": "0",
    "pageCacheLockTimeMills": "0",
    "pullThreadPoolQueueHeadWaitTimeMills": "0",
    "queryThreadPoolQueueSize": "0",
    "queryThreadPoolQueueHeadWaitTimeMills": "0",
    "EndTransactionQueueSize": "0",
    "remainTransientStoreBufferNumbs": "2147483647",
}
"""Required by tools, though there is no such queue, buffer or measurement here."""


class Load(Struct, frozen=True):
    """Sends and pulls that are waiting now."""

    sends_waiting: int = 0
    send_wait_ms: int = 0
    """How long the oldest of them has waited."""
    pulls_held: int = 0
    pulls_refused: int = 0
    """Since the start, by a limit of waiting pulls."""


@dataclass(eq=False, kw_only=True)
class RuntimeInfo:
    config: BrokerConfig
    stats: Stats
    store: Store
    searches: Searches
    delay_progress: Callable[[], DelayOffsets]
    clock: Clock
    files: Files = REAL_FILES
    load: Callable[[], Load] = Load
    put_times: PutTimes = field(default_factory=PutTimes)
    work: Callable[[], Iterable[Watch]] = tuple

    def __post_init__(self) -> None:
        self.replication: Callable[[], dict[str, str]] = dict
        self._boot_ms = self.clock.now_ms()
        self._boot_monotonic_ms = self.clock.monotonic_ms()

    async def all(self) -> dict[str, str]:
        """Return all keys and values."""
        found = None
        # What a failing disk cannot read must not hide all the rest.
        with contextlib.suppress(DiskFailed):
            found = await self.searches.result(self.store.find_message(self.store.min_offset))
        entry = None if found is None else read_entry(found)
        earliest = _NO_TIME if entry is None else str(entry.store_timestamp_ms)
        return {**self(), "earliestMessageTimeStamp": earliest}

    def __call__(self) -> dict[str, str]:
        """Return those that are known without reading messages."""
        return {
            **_CONSTANT,
            **self._life(),
            **self._counts(),
            **self._days(),
            **self._log(),
            **self._disk(self.config.directory),
            **self._waiting(self.load()),
            **self._delays(),
            **self.replication(),
            **summary(self.work()),
        }

    def _life(self) -> dict[str, str]:
        seconds = (self.clock.monotonic_ms() - self._boot_monotonic_ms) // 1000
        minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86_400
        running = f"{days} days, {hours % 24} hours, {minutes % 60} minutes, {seconds % 60} seconds"
        return {
            "bootTimestamp": str(self._boot_ms),
            "startAcceptSendRequestTimeStamp": str(self.config.access.sends_from_ms),
            "runtime": f"[ {running} ]",
            "brokerVersion": str(VERSION),
            "brokerVersionDesc": _VERSION_NAME,
            # Tells our tools what they may request beyond Apache RocketMQ's features.
            "turbopumpVersion": __version__,
            "core": CORE_NAME,
        }

    def _counts(self) -> dict[str, str]:
        stats, puts = self.stats, self.stats.puts
        found, missed = stats.request_rates(stats.gets), stats.request_rates(stats.misses)
        return {
            "putMessageEntireTimeMax": str(self.put_times.max_ms),
            "putMessageDistributeTime": str(self.put_times),
            "putMessageTimesTotal": str(puts.messages),
            "putMessageFailedTimes": str(stats.failures.times),
            "putMessageSizeTotal": str(puts.bytes),
            "putMessageAverageSize": str(puts.bytes / puts.messages if puts.messages else 0.0),
            "putTps": _rates(stats.message_rates(puts)),
            "getFoundTps": _rates(found),
            "getMissTps": _rates(missed),
            "getTotalTps": _rates(_both(found, missed)),
            "getTransferedTps": _rates(stats.message_rates(stats.gets)),
        }

    def _days(self) -> dict[str, str]:
        return {
            f"msg{name}Total{when}": str(count)
            for when, counts in zip(_DAYS, self.stats.days, strict=True)
            for name, count in zip(("Put", "Get"), counts, strict=True)
        }

    def _log(self) -> dict[str, str]:
        store = self.store
        unreadable = store.written_end - store.readable_end
        return {
            # Ours: why messages are refused; empty when they are not.
            "messagesRefused": str(store.refusal or ""),
            "commitLogMinOffset": str(store.min_offset),
            "commitLogMaxOffset": str(store.written_end),
            "dispatchBehindBytes": str(unreadable),
            "remainHowManyDataToFlush": f"{unreadable} B",
            "damagedMessages": str(store.damage.messages),
            "repairedQueueUnits": str(store.damage.repaired_units),
            "damagedIndexFiles": str(store.damage.index_files),
            "damagedLogRanges": str(store.damage.log_ranges),
            "scrubPosition": str(store.damage.scrubbed_to),
            "scrubPasses": str(store.damage.scrub_passes),
        }

    def _disk(self, directory: Path) -> dict[str, str]:
        ratio, space = f"{self.files.used_ratio(directory):.2f}", self.files.space(directory)
        total, free = space.total_bytes / _GIB, space.free_bytes / _GIB
        capacity = f"Total : {total:.1f} GiB, Free : {free:.1f} GiB."
        return {
            "commitLogDiskRatio": ratio,
            f"commitLogDiskRatio_{directory / 'commitlog'}": ratio,
            "consumeQueueDiskRatio": ratio,
            "commitLogDirCapacity": capacity,
        }

    def _waiting(self, load: Load) -> dict[str, str]:
        overload = self.config.overload
        return {
            "sendThreadPoolQueueSize": str(load.sends_waiting),
            "sendThreadPoolQueueCapacity": str(overload.sends_waiting_max),
            "sendThreadPoolQueueHeadWaitTimeMills": str(load.send_wait_ms),
            "pullThreadPoolQueueSize": str(load.pulls_held),
            "pullThreadPoolQueueCapacity": str(self.config.long_polling.held_max),
            # Ours: pulls that did not wait because of a limit.
            "longPollsRefused": str(load.pulls_refused),
            # Ends of transactions wait for the disk with the sends, queries in their connections.
            "EndTransactionThreadPoolQueueCapacity": str(overload.sends_waiting_max),
            "queryThreadPoolQueueCapacity": str(overload.connections_max),
        }

    def _delays(self) -> dict[str, str]:
        found = {}
        for level, offset in self.delay_progress().offset_table.items():
            _, high = self.store.queue_range(SCHEDULE_TOPIC, level - 1)
            found[f"scheduleMessageOffset_{level}"] = f"{offset},{high}"
        return found


def _both(one: Rates, other: Rates) -> Rates:
    pairs = zip(one, other, strict=True)
    return tuple(None if a is None or b is None else a + b for a, b in pairs)


def _rates(rates: Rates) -> str:
    """Format the rates as tools split them: at blanks, missing ones left empty."""
    return " ".join("" if rate is None else str(rate) for rate in rates)
