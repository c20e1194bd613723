"""A broker's configuration as keys and values: RocketMQ's own keys where it has one.

Files are ``key=value`` lines, as in ``broker.conf``, or TOML with the same keys. An unknown key is
refused, and the error names the nearest known one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, get_type_hints

from turbopump.broker.config import RECORD_EXTRA_BYTES, BrokerConfig, Role
from turbopump.errors import InvalidArgument
from turbopump.machine.process import memory_bytes
from turbopump.settings import KINDS, Kind, Settings, nearest_key
from turbopump.store.config import UNIT_BYTES, FlushMode
from turbopump.wire.delay_levels import parse_delay_levels

_log = logging.getLogger(__name__)

_PAGE_BYTES = 4096
_HOUR_MS = 3_600_000
_DELAY_UNITS = (("d", 86_400_000), ("h", _HOUR_MS), ("m", 60_000), ("s", 1000))

ALWAYS_BLACKLISTED = frozenset({"brokerConfigPath", "rocketmqHome", "configBlackList"})


@dataclass(frozen=True, slots=True)
class Setting:
    """One key, and the field it stands for."""

    key: str
    path: str
    """The field, as in ``identity.cluster``."""
    kind: Kind
    live: bool = False
    """Whether a change takes effect while the broker runs."""


# --- reading and writing values -------------------------------------------------------------------


def _read_parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


def _write_delay(delay_ms: int) -> str:
    for unit, unit_ms in _DELAY_UNITS:
        if delay_ms and delay_ms % unit_ms == 0:
            return f"{delay_ms // unit_ms}{unit}"
    return f"{delay_ms // 1000}s"


def _one_of(members: Mapping[str, Enum]) -> Kind:
    names = {member: name for name, member in members.items()}
    return Kind(members.__getitem__, names.__getitem__, " or ".join(members))


_INT, _BOOL = KINDS[int], KINDS[bool]
_ADDRESSES = Kind(
    lambda text: tuple(_read_parts(text)), ";".join, "host:port or URLs, several separated by ;"
)
_KEYS = Kind(
    lambda text: frozenset(_read_parts(text)),
    lambda keys: ";".join(sorted(keys)),
    "keys separated by ;",
)
_ROLE = _one_of({role.value: role for role in Role})
_FLUSH = _one_of({"ASYNC_FLUSH": FlushMode.ASYNC, "SYNC_FLUSH": FlushMode.SYNC})
_HOURS = Kind(
    lambda text: frozenset(map(int, _read_parts(text))),
    lambda hours: ";".join(f"{hour:02d}" for hour in sorted(hours)),
    "hours from 00 to 23, several separated by ;",
)
_RESERVED = Kind(
    # With 0 hours files may be deleted immediately: to the store, that is the shortest time.
    lambda text: max(int(text) * _HOUR_MS, 1),
    lambda ms: str(ms // _HOUR_MS),
    "a whole number of hours",
)
_PERCENT = Kind(lambda text: int(text) / 100, lambda ratio: str(round(ratio * 100)), "a percentage")
_MEMORY_PERCENT = Kind(
    lambda text: memory_bytes() * int(text) // 100,
    lambda size: str(round(size * 100 / memory_bytes())),
    "a percentage",
)
_DELAYS = Kind(
    parse_delay_levels,
    lambda levels_ms: " ".join(map(_write_delay, levels_ms)),
    "delays such as 1s 5s 10s 1m 2h",
)
_PAGES = Kind(
    lambda text: int(text) * _PAGE_BYTES,
    lambda size: str(size // _PAGE_BYTES),
    "a whole number of pages",
)
_UNITS = Kind(
    lambda text: -(-int(text) // UNIT_BYTES),
    lambda units: str(units * UNIT_BYTES),
    "a whole number of bytes",
)


# --- the keys -------------------------------------------------------------------------------------

_KINDS = {**KINDS, Role: _ROLE, tuple[str, ...]: _ADDRESSES, frozenset[str]: _KEYS}
"""By the type of a field."""


def _declared(config: type[Any], prefix: str = "") -> Iterator[Setting]:
    """Return the settings that a configuration and its parts declare by key."""
    types = get_type_hints(config)
    for each in fields(config):
        path, kind = prefix + each.name, types[each.name]
        if isinstance(kind, type) and is_dataclass(kind):
            yield from _declared(kind, f"{path}.")
        elif "key" in each.metadata:
            yield Setting(each.metadata["key"], path, _KINDS[kind], each.metadata["live"])


_STORE_SETTINGS = (
    Setting("flushDiskType", "store.flush.mode", _FLUSH),
    Setting("flushIntervalCommitLog", "store.flush.interval_ms", _INT),
    Setting("flushCommitLogLeastPages", "store.flush.dirty_bytes_min", _PAGES),
    Setting("flushCommitLogThoroughInterval", "store.flush.thorough_interval_ms", _INT),
    Setting("flushIntervalConsumeQueue", "store.flush.queue_interval_ms", _INT),
    Setting("maxTransferBytesOnMessageInMemory", "store.limits.memory_bytes_max", _INT),
    Setting("maxTransferCountOnMessageInMemory", "store.limits.memory_count_max", _INT),
    Setting("maxTransferBytesOnMessageInDisk", "store.limits.disk_bytes_max", _INT),
    Setting("maxTransferCountOnMessageInDisk", "store.limits.disk_count_max", _INT),
    Setting("maxFilterMessageSize", "store.limits.scan_units_max", _UNITS),
    Setting("accessMessageInMemoryMaxRatio", "store.limits.recent_bytes", _MEMORY_PERCENT),
    Setting("fileReservedTime", "store.retention.reserved_ms", _RESERVED, live=True),
    Setting("deleteWhen", "store.retention.delete_hours", _HOURS, live=True),
    Setting("diskMaxUsedSpaceRatio", "store.retention.early_ratio", _PERCENT, live=True),
    Setting("diskSpaceCleanForciblyRatio", "store.retention.forced_ratio", _PERCENT, live=True),
    Setting("diskSpaceWarningLevelRatio", "store.retention.full_ratio", _PERCENT, live=True),
    Setting("mappedFileSizeCommitLog", "store.segment_bytes", _INT),
    Setting("mappedFileSizeConsumeQueue", "store.queue_segment_units", _UNITS),
    Setting("maxHashSlotNum", "store.index_slots", _INT),
    Setting("maxIndexNum", "store.index_entries", _INT),
    Setting("messageIndexEnable", "store.index_enabled", _BOOL),
    Setting("messageDelayLevel", "store.delay_levels", _DELAYS),
    Setting("checkCRCOnRecover", "store.check_crc_on_recovery", _BOOL),
    Setting("scrubBytesPerSecond", "store.scrub_bytes_per_s", _INT),
)
"""The store does not know the keys of its settings."""

SETTINGS = (*_declared(BrokerConfig), *_STORE_SETTINGS)

_BY_KEY = {setting.key: setting for setting in SETTINGS}
KEYS = _BY_KEY.keys()

_VALUE_CHARS_MAX = 8192
"""Longest value of any setting, such as a list of name servers."""

UNSUPPORTED = {
    "aclEnable": "false",
    "enableDLegerCommitLog": "false",
    "enableLmq": "false",
    "enableMultiDispatch": "false",
    "transientStorePoolEnable": "false",
    "disableConsumeIfConsumerReadSlowly": "false",
    "enableConsumeQueueExt": "false",
}
"""Apache RocketMQ's keys whose other values are unsupported; refusing them beats ignoring them."""

WITHOUT_EFFECT = frozenset(
    {
        "rocketmqHome", "brokerConfigPath",
        "sendMessageThreadPoolNums", "pullMessageThreadPoolNums", "queryMessageThreadPoolNums",
        "adminBrokerThreadPoolNums", "clientManageThreadPoolNums", "consumerManageThreadPoolNums",
        "heartbeatThreadPoolNums", "endTransactionThreadPoolNums", "putMessageFutureThreadPoolNums",
        "processReplyMessageThreadPoolNums", "serverWorkerThreads", "serverSelectorThreads",
        "serverCallbackExecutorThreads", "serverOnewaySemaphoreValue", "serverAsyncSemaphoreValue",
        "serverSocketSndBufSize", "serverSocketRcvBufSize", "serverSocketBacklog",
        "serverPooledByteBufAllocatorEnable", "useEpollNativeSelector",
        "warmMapedFileEnable", "flushCommitLogTimed", "useReentrantLockWhenPutMessage",
        "transferMsgByHeap", "cleanFileForciblyEnable", "redeleteHangedFileInterval",
        "destroyMapedFileIntervalForcibly", "deleteCommitLogFilesInterval",
        "deleteConsumeQueueFilesInterval", "cleanResourceInterval", "diskFallRecorded",
        "osPageCacheBusyTimeOutMills",
    }
)  # fmt: skip
"""Apache RocketMQ's keys about threads, buffers and the like, which have no counterpart here."""


# --- whole configurations -------------------------------------------------------------------------


def parse(settings: Settings) -> BrokerConfig:
    """Return the configuration of some keys and texts; missing keys keep their defaults."""
    return _applied(BrokerConfig(), _known(settings))


REPORTED_KEYS = ("useTLS", "brokerConfigPath", "clientCallbackExecutorThreads")
"""Reported by brokers besides their settings: `mqadmin exportConfigs` reads the first, the second
is the file that keeps changes made while the broker runs, and the third is how many processors the
machine has, where `mqadmin exportMetrics` looks for them."""


def as_properties(config: BrokerConfig) -> dict[str, str]:
    """Return all keys and their values as texts, in the order of the documentation."""
    return {setting.key: setting.kind.write(_field(config, setting)) for setting in SETTINGS}


def blacklisted(config: BrokerConfig, keys: Iterable[str]) -> list[str]:
    """Return those keys that must not be changed while the broker runs."""
    return sorted((ALWAYS_BLACKLISTED | config.access.config_blacklist).intersection(keys))


def updated(config: BrokerConfig, settings: Settings) -> BrokerConfig:
    """Return the configuration with some values changed while the broker runs.

    Unknown keys are skipped, as in the protocol. Refused are changes that would take effect only
    after a restart, all keys on the blacklist, and unsupported values.
    """
    refused = blacklisted(config, settings)
    if refused:
        raise InvalidArgument(
            f"{', '.join(refused)} cannot be changed while the broker runs: see configBlackList"
        )
    for key, text in settings.items():
        if key in UNSUPPORTED:
            _refuse_unsupported(key, text)
    known = {key: value for key, value in settings.items() if key in _BY_KEY}
    fresh = _applied(config, known)
    for key in known:
        setting = _BY_KEY[key]
        if not setting.live and _field(fresh, setting) != _field(config, setting):
            raise InvalidArgument(
                f"{key} takes effect only at start: change it in the configuration file and restart"
            )
    return fresh


def _known(settings: Settings) -> dict[str, str]:
    known = {}
    for key, text in settings.items():
        if key in _BY_KEY:
            known[key] = text
        elif key in UNSUPPORTED:
            _refuse_unsupported(key, text)
        elif key in WITHOUT_EFFECT:
            _log.info("%s has no effect in Turbopump", key)
        else:
            raise InvalidArgument(_unknown_text(key))
    return known


def _refuse_unsupported(key: str, text: str) -> None:
    if text.lower() != UNSUPPORTED[key]:
        raise InvalidArgument(f"{key} must be {UNSUPPORTED[key]}, got {text!r}: not supported")


def _unknown_text(key: str) -> str:
    near = nearest_key(key, (*_BY_KEY, *UNSUPPORTED))
    hint = f"did you mean {near}?" if near else "see the configuration guide for all keys"
    if near in UNSUPPORTED:
        hint += " Other values than its default are not supported"
    return f"unknown key {key!r}: {hint}"


def _applied(config: BrokerConfig, settings: Settings) -> BrokerConfig:
    changes: dict[str, Any] = {}
    for key, text in settings.items():
        setting = _BY_KEY[key]
        if len(text) > _VALUE_CHARS_MAX:
            most = _VALUE_CHARS_MAX
            raise InvalidArgument(f"{key} must be at most {most} characters, got {len(text)}")
        try:
            changes[setting.path] = setting.kind.read(text)
        except (ValueError, KeyError) as error:
            allowed = setting.kind.allowed
            raise InvalidArgument(f"{key} must be {allowed}, got {text!r}") from error
    if "limits.message_bytes_max" in changes:
        changes["store.record_bytes_max"] = changes["limits.message_bytes_max"] + RECORD_EXTRA_BYTES
    applied: BrokerConfig = _with(config, changes, "")
    return applied


def _with(part: Any, changes: Mapping[str, Any], prefix: str) -> Any:
    """Return a dataclass with the fields changed whose path has a prefix, nested ones included."""
    own: dict[str, Any] = {}
    for path, value in changes.items():
        if path.startswith(prefix):
            name, dot, _ = path[len(prefix) :].partition(".")
            own[name] = _with(getattr(part, name), changes, f"{prefix}{name}.") if dot else value
    try:
        return replace(part, **own)
    except InvalidArgument as error:
        raise InvalidArgument(_with_keys(str(error), prefix, own)) from error


def _with_keys(text: str, prefix: str, names: Iterable[str]) -> str:
    """Return an error text with the keys of the fields that it mentions, unless it names them."""
    if any(setting.key in text for setting in SETTINGS):
        return text
    keys = [s.key for s in SETTINGS for name in names if s.path == prefix + name and name in text]
    return f"{', '.join(keys)}: {text}" if keys else text


def _field(config: BrokerConfig, setting: Setting) -> Any:
    value: Any = config
    for name in setting.path.split("."):
        value = getattr(value, name)
    return value
