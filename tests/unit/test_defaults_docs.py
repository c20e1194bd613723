"""The table of defaults that differ from Apache RocketMQ's is true and complete."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

from turbopump import (
    ClientConfig,
    Compression,
    FetchLimits,
    FlowLimits,
    Listening,
    LitePullConfig,
    MessageRules,
    ProducerConfig,
    PullConfig,
    Pulling,
    PullTimes,
    aio,
)
from turbopump.broker.config import BrokerConfig
from turbopump.broker.config_keys import as_properties
from turbopump.client import consumption, offsets
from turbopump.client.allocation import average
from turbopump.client.delivery import orderly
from turbopump.nameserver import NameServerConfig
from turbopump.settings import keys_of
from turbopump.wire import framing
from turbopump.wire.command import whole_body
from vectors import frame

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "defaults.md").read_text()
CONFIGS = (
    ClientConfig, ProducerConfig, MessageRules, FlowLimits, Pulling, Listening, PullConfig,
    PullTimes, LitePullConfig, FetchLimits,
)  # fmt: skip
CONSUMERS = (aio.TransactionProducer, aio.PushConsumer, aio.PullConsumer, aio.LitePullConsumer)
CLIENT = {
    "ClientConfig.namespace": "", "ClientConfig.instance": "", "ClientConfig.host": "",
    "ClientConfig.tls": None, "ClientConfig.request_timeout": 3, "ClientConfig.route_interval": 30,
    "ClientConfig.unit_name": "", "ClientConfig.unit_mode": False,
    "ClientConfig.heartbeat_interval": 30, "ClientConfig.persist_interval": 5,
    "ClientConfig.requests_in_flight_max": 65_535, "ClientConfig.request_hooks": (),
    "ProducerConfig.send_timeout": 3, "ProducerConfig.retries_max": 2,
    "ProducerConfig.retry_unless_ok": False, "ProducerConfig.avoid_slow_brokers": False,
    "ProducerConfig.in_flight_max": 50_000,
    "MessageRules.body_bytes_max": 4_194_304, "MessageRules.compress_from_bytes": 4096,
    "MessageRules.compression": Compression.ZLIB, "MessageRules.compression_level": 5,
    "MessageRules.new_topic_queues": 4,
    "MessageRules.delay_levels": "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h",
    "TransactionProducer.check_workers": 1, "TransactionProducer.topics": None,
    "PushConsumer.start_from": "last", "PushConsumer.orderly": False,
    "PushConsumer.broadcast": False, "PushConsumer.strategy": average,
    "PushConsumer.concurrency": (20, 20), "PushConsumer.batch_size": 1,
    "PushConsumer.max_attempts": 16,
    "PushConsumer.offsets_directory": None, "PushConsumer.offset_store": None,
    "FlowLimits.messages_per_queue": 1000, "FlowLimits.mebibytes_per_queue": 100,
    "FlowLimits.span": 2000, "FlowLimits.messages_per_topic": None,
    "FlowLimits.mebibytes_per_topic": None,
    "Pulling.batch_size": 32, "Pulling.interval": 0, "Pulling.hold": 15, "Pulling.timeout": 30,
    "Pulling.carries_subscription": False,
    "Listening.timeout": 900, "Listening.close_wait": 0, "Listening.suspend": 1,
    "PullConfig.max_attempts": 16,
    "PullTimes.timeout": 10, "PullTimes.hold": 20, "PullTimes.held_timeout": 30,
    "PullConsumer.topics": (), "PullConsumer.on_queues": None,
    "LitePullConsumer.start_from": "last", "LitePullConsumer.strategy": average,
    "LitePullConfig.auto_commit": True, "LitePullConfig.commit_interval": 5,
    "LitePullConfig.poll_timeout": 5, "LitePullConfig.poll_count_max": 10,
    "LitePullConfig.fetch_count_max": 10,
    "FetchLimits.messages_per_queue": 1000, "FetchLimits.bytes_per_queue": 104_857_600,
    "FetchLimits.messages_of_all": 10_000, "FetchLimits.span": 2000,
}  # fmt: skip
"""The defaults of Apache RocketMQ's clients, under the names that the settings have here."""

BROKER = {
    "traceTopicEnable": "false", "transactionTimeOut": "6000", "transactionCheckInterval": "60000",
    "mappedFileSizeCommitLog": "1073741824", "mappedFileSizeConsumeQueue": "6000000",
    "maxHashSlotNum": "5000000", "maxIndexNum": "20000000", "enablePropertyFilter": "false",
    "storePathRootDir": "~/store", "configBlackList": "brokerConfigPath;configBlackList",
    "namesrvAddr": "", "brokerIP1": "", "brokerIP2": "", "bindAddress": "0.0.0.0",
    "slaveDeletesOnItsOwn": "true", "rmqAddressServerDomain": "jmenv.tbsite.net",
    "rmqAddressServerSubGroup": "nsaddr",
    # Fixed there, or given by the system.
    "brokerName": as_properties(BrokerConfig())["brokerName"], "vipChannelEnable": "true",
    "haMasterAddress": "", "maxHaTransferByteInSecond": "0", "channelExpiredTimeout": "120000",
    "rebalanceLockMaxLiveTime": "60000", "longPollingSweepInterval": "5000",
    "maxFilterMessageSize": "16000", "diskSpaceCleanForciblyRatio": "85",
    "diskSpaceWarningLevelRatio": "90", "scrubBytesPerSecond": "0",
}  # fmt: skip
"""Defaults that the recorded broker's configuration overrides or does not list."""

OFF = {
    "filterServerPort", "filterCodesMax", "filterCodeMemoryMax", "filterCodeCpuTimePerMessage",
    "filterCodeTimePerMessage",
}  # fmt: skip
"""Limits of a feature that is off by default, as there."""

NAME_SERVER = {
    "bindAddress": "0.0.0.0", "kvConfigPath": "~/namesrv/kvConfig.json",
    "configStorePath": "~/namesrv/namesrv.properties",
}  # fmt: skip
NONE = object()
"""The value of a setting that does not exist."""


class Row(NamedTuple):
    of: str
    setting: str
    here: str
    theirs: str


def rows(of: str) -> dict[str, Row]:
    """Return the rows of the table for a part of the system, or for all clients."""
    found = re.findall(
        r"^\| ([\w ]+) \| `([\w.]+)` \| (.+?) \| (.+?) \| .+ \|$", PAGE, re.MULTILINE
    )
    servers = ("broker", "name server")
    named = (Row(*each) for each in found)
    return {
        row.setting: row
        for row in named
        if row.of == of or (of == "client" and row.of not in servers)
    }


def value(cell: str) -> str | None:
    """Return the value that a cell begins with; other cells describe it."""
    begins = re.match(r"`(.+?)`", cell)
    return begins[1] if begins else None


def client_settings() -> Iterator[tuple[str, Any]]:
    for config in CONFIGS:
        for each in fields(config):
            # Without a default, it is another configuration.
            if each.init and each.default is not MISSING:
                yield f"{config.__name__}.{each.name}", each.default
    shared = inspect.signature(aio.Producer).parameters.keys()
    parts = {"flow", "pulling", "listening", "subscriptions"}
    for kind in CONSUMERS:
        for name, parameter in inspect.signature(kind).parameters.items():
            if parameter.default is not parameter.empty and name not in shared | parts:
                yield f"{kind.__name__}.{name}", parameter.default


def recorded(name: str) -> dict[str, str]:
    lines = whole_body(framing.decode(frame(name))).decode().splitlines()
    return dict(line.split("=", 1) for line in lines if line)


def as_text(setting: object) -> str | None:
    return None if setting in ("", None, NONE) else str(setting).replace(str(Path.home()), "~")


def check(of: str, here: dict[str, Any], theirs: dict[str, Any], described: set[str]) -> None:
    """Compare a part's rows with both systems' defaults, which are otherwise equal."""
    documented = rows(of)
    assert documented.keys() <= here.keys() | theirs.keys()
    differing = {key for key in here.keys() | theirs if here.get(key) != theirs.get(key, NONE)}
    assert documented.keys() - described == differing - described
    for key, row in documented.items():
        assert value(row.here) == as_text(here.get(key)), row
        assert value(row.theirs) == as_text(theirs.get(key)), row


def test_defaults_of_clients() -> None:
    here = dict(client_settings())
    theirs = {"ClientConfig.nameserver": NONE, **CLIENT}
    check("client", here, theirs, described=set())
    pulling = Pulling()
    own, others = (pulling.count_max(is_own_broker=is_own) for is_own in (True, False))
    row = rows("client")["Pulling.batch_size"]
    assert row.here == f"{own} from Turbopump's brokers, {others} from others"


def test_defaults_of_brokers() -> None:
    here = {key: each for key, each in as_properties(BrokerConfig()).items() if key not in OFF}
    here["storePathRootDir"] = here["storePathRootDir"].replace(str(Path.home()), "~")
    theirs = {**recorded("get_broker_config.response"), **BROKER}
    theirs = {key: each for key, each in theirs.items() if key in here}
    check("broker", here, theirs, described={"brokerIP1"})


def test_defaults_of_name_servers() -> None:
    here: dict[str, Any] = {**keys_of(NameServerConfig)}
    here["kvConfigPath"] = as_text(NameServerConfig().kv_config_path)
    theirs = {**recorded("get_namesrv_config.response"), **NAME_SERVER}
    check("name server", here, {k: v for k, v in theirs.items() if k in here}, described=set())


def test_intervals_that_are_not_settings() -> None:
    found = re.findall(r"^\| push consumer \| how .+? \| ([\d.]+) s \|", PAGE, re.MULTILINE)
    times_ms = consumption._EXPIRY_CHECK_MS, orderly._RUN_MS_MAX, offsets.COMMIT_AGAIN_MS
    assert [float(each) * 1000 for each in found] == list(times_ms)
