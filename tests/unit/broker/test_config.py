"""Settings: defaults, text forms, rejected values, and that all of them are documented."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from broker_parts import finished
from turbopump.broker.config import (
    AccessConfig,
    BrokerConfig,
    IdentityConfig,
    LimitsConfig,
    RegistrationConfig,
    Role,
    local_address,
)
from turbopump.broker.config_keys import (
    SETTINGS,
    UNSUPPORTED,
    WITHOUT_EFFECT,
    as_properties,
    parse,
    updated,
)
from turbopump.broker.live_config import LiveConfig
from turbopump.errors import InvalidArgument
from turbopump.settings import parse_properties, read_settings, render_properties
from turbopump.store.config import FlushMode
from turbopump.testing import VirtualClock
from vectors import frame

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "configuration.md"
NAMED_IN_WORDS = {
    "brokerName", "storePathRootDir", "brokerIP1", "namesrvAddr", "brokerIP2", "haMasterAddress",
}  # fmt: skip

OTHER_VALUES = {
    "brokerClusterName": "other",
    "brokerName": "other-b",
    "bindAddress": "0.0.0.0",
    "listenPort": "0",
    "vipChannelEnable": "false",
    "brokerIP1": "10.1.2.3",
    "regionId": "north",
    "traceOn": "false",
    "namesrvAddr": "10.0.0.1:9876;10.0.0.2:9876",
    "fetchNamesrvAddrByAddressServer": "true",
    "rmqAddressServerDomain": "names.example",
    "rmqAddressServerSubGroup": "north",
    "registerNameServerPeriod": "10000",
    "registerBrokerTimeoutMills": "100",
    "forceRegister": "false",
    "compressedRegister": "true",
    "haListenPort": "12345",
    "brokerIP2": "10.1.2.4",
    "haMasterAddress": "10.0.0.9:10912",
    "haSendHeartbeatInterval": "1000",
    "haHousekeepingInterval": "9000",
    "haTransferBatchSize": "65536",
    "maxHaTransferByteInSecond": "1000000",
    "haSlaveFallbehindMax": "1048576",
    "slaveTimeout": "500",
    "slaveDeletesOnItsOwn": "true",
    "brokerPermission": "4",
    "startAcceptSendRequestTimeStamp": "1700000000000",
    "configBlackList": "brokerConfigPath;brokerPermission",
    "autoCreateTopicEnable": "false",
    "topicsMax": "100",
    "defaultTopicQueueNums": "3",
    "clusterTopicEnable": "false",
    "brokerTopicEnable": "false",
    "traceTopicEnable": "true",
    "msgTraceTopicName": "traces",
    "autoCreateSubscriptionGroup": "false",
    "groupsMax": "200",
    "notifyConsumerIdsChangedEnable": "false",
    "notifyConsumerIdsChangedPerSecond": "500",
    "channelExpiredTimeout": "5000",
    "rebalanceLockMaxLiveTime": "30000",
    "memberReconnectTimeout": "5000",
    "enablePropertyFilter": "false",
    "filterSupportRetry": "true",
    "filterServerNums": "2",
    "filterServerPort": "10913",
    "filterCodesMax": "8",
    "filterCodeMemoryMax": "268435456",
    "filterCodeCpuTimePerMessage": "20",
    "filterCodeTimePerMessage": "1000",
    "rejectTransactionMessage": "true",
    "transactionTimeOut": "3000",
    "transactionCheckInterval": "2000",
    "transactionCheckMax": "5",
    "longPollingEnable": "false",
    "longPollingTimeMax": "30000",
    "shortPollingTimeMills": "10",
    "longPollingSweepInterval": "20",
    "pullThreadPoolQueueCapacity": "30",
    "longPollsPerConnectionMax": "31",
    "longPollsPerGroupMax": "32",
    "longPollsPerHostMax": "33",
    "slaveReadEnable": "true",
    "offsetCheckInSlave": "true",
    "brokerFastFailureEnable": "false",
    "waitTimeMillsInSendQueue": "40",
    "sendThreadPoolQueueCapacity": "50",
    "unflushedBytesMax": "55",
    "syncFlushTimeout": "60",
    "connectionsMax": "70",
    "receiveBytesMax": "100000000",
    "busyPollMicros": "75",
    "maxMessageSize": "1000",
    "defaultQueryMaxNum": "64",
    "maxQueryIndexEntries": "1000",
    "maxTransferCountOnBulkPull": "500",
    "maxTransferBytesOnBulkPull": "600000",
    "flushConsumerOffsetInterval": "80",
    "flushDelayOffsetInterval": "9000",
    "storePathRootDir": "elsewhere/store",
    "flushDiskType": "SYNC_FLUSH",
    "flushIntervalCommitLog": "90",
    "flushCommitLogLeastPages": "2",
    "flushCommitLogThoroughInterval": "100",
    "flushIntervalConsumeQueue": "110",
    "maxTransferBytesOnMessageInMemory": "120",
    "maxTransferCountOnMessageInMemory": "130",
    "maxTransferBytesOnMessageInDisk": "140",
    "maxTransferCountOnMessageInDisk": "150",
    "maxFilterMessageSize": "2000",
    "accessMessageInMemoryMaxRatio": "20",
    "fileReservedTime": "0",
    "deleteWhen": "03;16",
    "diskMaxUsedSpaceRatio": "60",
    "diskSpaceCleanForciblyRatio": "70",
    "diskSpaceWarningLevelRatio": "95",
    "mappedFileSizeCommitLog": "8388608",
    "mappedFileSizeConsumeQueue": "2000",
    "maxHashSlotNum": "50",
    "maxIndexNum": "200",
    "messageIndexEnable": "false",
    "messageDelayLevel": "1s 90s 2m 1h 1d",
    "checkCRCOnRecover": "false",
    "scrubBytesPerSecond": "1048576",
}


def load(path: Path) -> BrokerConfig:
    return parse(read_settings(path))


def documented() -> dict[str, tuple[str, bool]]:
    """Return what the guide documents for each key: its default, and whether it is live."""
    section = GUIDE.read_text(encoding="utf-8").partition("\n## Broker\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .+? \| (live)? ?\|$", section, re.MULTILINE)
    return {key: (default, bool(live)) for key, default, live in rows}


def test_every_key_is_documented_with_its_default() -> None:
    told = documented()
    assert list(told) == [setting.key for setting in SETTINGS]
    for key, default in as_properties(BrokerConfig()).items():
        if key not in NAMED_IN_WORDS:
            assert told[key][0] == f"`{default}`"
    assert {key for key, (_, live) in told.items() if live} == {s.key for s in SETTINGS if s.live}


def test_every_key_is_varied() -> None:
    # Each of the two limits the other: see the tests of roles.
    assert {s.key for s in SETTINGS} - OTHER_VALUES.keys() == {"brokerId", "brokerRole"}


def test_every_field_has_a_key() -> None:
    left_out = {
        # Follows from maxMessageSize.
        "store.record_bytes_max",
        # These need no tuning; Apache RocketMQ has no such settings.
        "store.open_files_max",
        "store.mapped_segments_max",
        "store.clean_check_segments",
        "store.flush.heal_interval_ms",
        "store.retention.segments_per_run_max",
    }
    assert set(_paths(BrokerConfig(), "")) - left_out == {setting.path for setting in SETTINGS}


def _paths(config: Any, prefix: str) -> list[str]:
    found: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name)
        path = prefix + field.name
        found += _paths(value, f"{path}.") if is_dataclass(value) else [path]
    return found


def test_defaults_survive_being_written_and_read() -> None:
    config = BrokerConfig()
    assert parse(parse_properties(render_properties(as_properties(config)))) == config


@pytest.mark.parametrize(
    "key", [s.key for s in SETTINGS if s.key not in {"brokerId", "brokerRole"}]
)
def test_each_key_changes_its_field_and_nothing_else(key: str) -> None:
    # The disk ratios limit each other.
    related = {"diskMaxUsedSpaceRatio": "60"} if key.startswith("diskSpace") else {}
    config = parse({**related, key: OTHER_VALUES[key]})
    defaults = as_properties(BrokerConfig())
    changed = {
        name: value
        for name, value in as_properties(config).items()
        if value != defaults[name] and name not in related
    }
    assert changed == {key: OTHER_VALUES[key]}


def test_toml_and_properties_lines_give_the_same_result(tmp_path: Path) -> None:
    toml, lines = tmp_path / "broker.toml", tmp_path / "broker.conf"
    toml.write_text('brokerName = "b"\nlistenPort = 0\ntraceOn = false\nfileReservedTime = 48\n')
    lines.write_text(
        "# as in the original's own broker.conf\n"
        "brokerName=b\nlistenPort = 0\ntraceOn=FALSE\nfileReservedTime=48\n"
        "brokerRole=ASYNC_MASTER\nbrokerId=0\nflushDiskType=ASYNC_FLUSH\ndeleteWhen=04\n"
    )
    assert load(toml) == load(lines)
    assert load(toml).store.retention.reserved_ms == 48 * 3_600_000


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"brokerNam": "b"}, ["'brokerNam'", "did you mean brokerName?"]),
        ({"AUTOCREATETOPIC": "b"}, ["did you mean autoCreateTopicEnable?"]),
        ({"aclEnabled": "true"}, ["'aclEnabled'", "did you mean aclEnable?"]),
        ({"zzz": "b"}, ["'zzz'", "guide"]),
        ({"listenPort": "70000"}, ["listenPort", "70000", "0 to 65535"]),
        ({"listenPort": "many"}, ["listenPort", "'many'", "whole number"]),
        ({"traceOn": "yes"}, ["traceOn", "'yes'", "true or false"]),
        ({"brokerName": "a/b"}, ["brokerName", "'a/b'", "characters"]),
        ({"brokerName": ".."}, ["brokerName", "not only dots, got '..'"]),
        ({"brokerClusterName": ""}, ["brokerClusterName", "''"]),
        ({"regionId": ""}, ["regionId must be a text on one line, not empty, got ''"]),
        ({"storePathRootDir": ""}, ["storePathRootDir must be a path, not empty, got ''"]),
        ({"regionId": "x" * 256}, ["regionId", "at most 255 characters, got 256"]),
        ({"namesrvAddr": "h:1;" * 3000}, ["namesrvAddr", "at most 8192 characters, got 12000"]),
        ({"namesrvAddr": "here"}, ["namesrvAddr", "'here'", "host:port"]),
        ({"namesrvAddr": "ftp://web/ns"}, ["namesrvAddr", "scheme 'ftp' is not supported"]),
        ({"rmqAddressServerDomain": "a b"}, ["rmqAddressServerDomain", "percent-encoded"]),
        ({"rmqAddressServerDomain": "http://a/b"}, ["rmqAddressServerDomain", "http://a/b"]),
        ({"registerNameServerPeriod": "1"}, ["registerNameServerPeriod", "10000 to 60000"]),
        ({"brokerPermission": "9"}, ["brokerPermission", "0 to 7"]),
        ({"defaultTopicQueueNums": "0"}, ["defaultTopicQueueNums", "1 to"]),
        ({"msgTraceTopicName": "a b"}, ["msgTraceTopicName", "'a b'"]),
        ({"maxMessageSize": "99999999"}, ["maxMessageSize", "99999999"]),
        ({"maxTransferCountOnBulkPull": "16385"}, ["maxTransferCountOnBulkPull", "1 to 16384"]),
        ({"flushDiskType": "MAYBE"}, ["flushDiskType", "ASYNC_FLUSH or SYNC_FLUSH"]),
        ({"flushIntervalCommitLog": "0"}, ["flushIntervalCommitLog", "0", "positive"]),
        ({"deleteWhen": "25"}, ["deleteWhen", "25", "0 to 23"]),
        ({"deleteWhen": "noon"}, ["deleteWhen", "'noon'"]),
        ({"diskMaxUsedSpaceRatio": "99"}, ["diskMaxUsedSpaceRatio", "0.99"]),
        ({"messageDelayLevel": "1s 2x"}, ["messageDelayLevel", "'1s 2x'"]),
        ({"messageDelayLevel": ""}, ["messageDelayLevel", "''", "at least one delay"]),
        (
            {"mappedFileSizeCommitLog": "4259847"},
            ["mappedFileSizeCommitLog", "4259847", "maxMessageSize 4194304", "at least 4259848"],
        ),
        (
            {"mappedFileSizeCommitLog": "65536", "maxMessageSize": "1000"},
            ["mappedFileSizeCommitLog", "65536", "maxMessageSize 1000", "at least 66544"],
        ),
        ({"aclEnable": "true"}, ["aclEnable", "must be false"]),
        ({"brokerRole": "SLAVE"}, ["brokerId", "0", "above 0 with brokerRole SLAVE"]),
        ({"brokerId": "1"}, ["brokerId", "1", "0 with ASYNC_MASTER"]),
        ({"brokerId": "1", "brokerRole": "SYNC_MASTER"}, ["brokerId", "0 with SYNC_MASTER"]),
        ({"brokerRole": "LEADER"}, ["brokerRole", "'LEADER'", "SYNC_MASTER or SLAVE"]),
        ({"haMasterAddress": "here"}, ["haMasterAddress", "'here'", "host:port"]),
        ({"haHousekeepingInterval": "4999"}, ["haHousekeepingInterval", "at least 5000"]),
        ({"haTransferBatchSize": "9999999"}, ["haTransferBatchSize", "1024 to 4190208"]),
        ({"storePathCommitLog": "x"}, ["'storePathCommitLog'", "storePathRootDir"]),
    ],
)
def test_errors_name_key_value_and_expected_range(
    settings: dict[str, str], told: list[str]
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(settings)
    for part in told:
        assert part in str(caught.value)


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    with pytest.raises(InvalidArgument, match=r"broker\.conf"):
        load(path)
    path.write_text("nonsense")
    with pytest.raises(InvalidArgument, match=r"broker\.conf.*line 1"):
        load(path)


def test_keys_without_a_counterpart_are_ignored() -> None:
    settings = dict.fromkeys(WITHOUT_EFFECT, "16") | UNSUPPORTED
    assert parse(settings) == BrokerConfig()


def test_every_key_of_apache_rocketmq_is_known_or_rejected_with_a_hint() -> None:
    text = frame("get_broker_config.response").partition(b"}shortPolling")[2].decode()
    keys = parse_properties("shortPolling" + text).keys()
    unknown = []
    for key in sorted(keys - {s.key for s in SETTINGS} - UNSUPPORTED.keys() - WITHOUT_EFFECT):
        with pytest.raises(InvalidArgument, match=key):
            parse({key: "1"})
        unknown.append(key)
    assert len(unknown) < len(keys)


def test_the_largest_message_decides_over_the_largest_record() -> None:
    config = parse({"maxMessageSize": str(8 * 1024 * 1024)})
    assert config.store.record_bytes_max == 8 * 1024 * 1024 + 64 * 1024
    with pytest.raises(InvalidArgument, match="maxMessageSize"):
        BrokerConfig(limits=LimitsConfig(message_bytes_max=8 * 1024 * 1024))


def test_addresses_for_clients() -> None:
    assert IdentityConfig(bind_host="10.0.0.1").reachable_host == "10.0.0.1"
    assert IdentityConfig(advertised_host="203.0.113.1").reachable_host == "203.0.113.1"
    assert IdentityConfig(bind_host="0.0.0.0").reachable_host == local_address()


def test_the_default_name_is_the_sanitized_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "höst/1.example")
    assert IdentityConfig().broker_name == "h-st-1.example"


@pytest.mark.parametrize(
    "kind",
    [AccessConfig, IdentityConfig, RegistrationConfig, BrokerConfig],
    ids=lambda k: k.__name__,
)
def test_configurations_are_frozen(kind: Any) -> None:
    config = kind()
    with pytest.raises(AttributeError):
        setattr(config, fields(config)[0].name, None)


def test_roles() -> None:
    assert IdentityConfig(role=Role.SLAVE).is_slave
    assert not IdentityConfig().is_slave
    assert parse({"brokerRole": "SLAVE", "brokerId": "1"}).identity.is_slave
    assert not parse({"brokerRole": "SYNC_MASTER"}).identity.is_slave


# --- changes while it runs ------------------------------------------------------------------------


def test_live_keys_change() -> None:
    config = updated(BrokerConfig(), {"brokerPermission": "4", "fileReservedTime": "0"})
    assert not config.access.can_write
    assert config.access.can_read
    assert config.store.retention.reserved_ms == 1


def test_unknown_keys_are_ignored() -> None:
    assert updated(BrokerConfig(), {"whatever": "1", "sendMessageThreadPoolNums": "3"}) == (
        BrokerConfig()
    )


def test_startup_only_keys_are_rejected_unless_unchanged() -> None:
    config = BrokerConfig()
    assert updated(config, {"flushDiskType": "ASYNC_FLUSH"}) == config
    assert config.store.flush.mode is FlushMode.ASYNC
    with pytest.raises(InvalidArgument, match="flushDiskType takes effect only at start"):
        updated(config, {"flushDiskType": "SYNC_FLUSH"})


@pytest.mark.parametrize("key", sorted(UNSUPPORTED))
def test_unimplemented_features_cannot_be_enabled(key: str) -> None:
    config = BrokerConfig()
    assert updated(config, {key: UNSUPPORTED[key].upper()}) == config
    with pytest.raises(InvalidArgument, match=f"{key} must be false, got 'true': not supported"):
        updated(config, {key: "true", "traceOn": "false"})


@pytest.mark.parametrize("key", ["brokerConfigPath", "rocketmqHome", "configBlackList", "regionId"])
def test_blacklisted_keys_are_rejected(key: str) -> None:
    config = parse({"configBlackList": "regionId"})
    with pytest.raises(InvalidArgument, match=key):
        updated(config, {key: "x"})


def test_a_change_is_reported_counted_and_saved(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("# mine\nregionId=old\n")
    live = LiveConfig(load(path), VirtualClock(), path)
    told: list[tuple[str, str]] = []
    live.listen(lambda old, fresh: told.append((old.identity.region, fresh.identity.region)))
    finished(live.change({"regionId": "new", "traceOn": "false"}))
    assert told == [("old", "new")]
    assert live.version.counter == 1
    assert path.read_text() == "# mine\nregionId=new\ntraceOn=false\n"
    assert load(path) == live.current
    finished(live.change({"regionId": "new"}))
    assert live.version.counter == 1


def test_only_known_keys_are_saved_and_in_their_own_section(tmp_path: Path) -> None:
    path = tmp_path / "all.conf"
    path.write_text("broker.regionId=old\nnameserver.listenPort=1\ntraceOn=true\n")
    live = LiveConfig(BrokerConfig(), VirtualClock(), path)
    finished(
        live.change(
            {"regionId": "new", "traceOn": "false", "brokerPermission": "4", "unknown": "1"}
        )
    )
    assert parse_properties(path.read_text()) == {
        "broker.regionId": "new",
        "nameserver.listenPort": "1",
        "traceOn": "false",
        "broker.brokerPermission": "4",
    }


def test_a_change_without_a_file_lasts_until_the_broker_stops(tmp_path: Path) -> None:
    path = tmp_path / "broker.toml"
    path.write_text('regionId = "old"\n')
    live = LiveConfig(load(path), VirtualClock(), path)
    finished(live.change({"regionId": "new"}))
    assert live.current.identity.region == "new"
    assert "old" in path.read_text()


def test_a_change_that_cannot_be_saved_is_not_applied(tmp_path: Path) -> None:
    live = LiveConfig(BrokerConfig(), VirtualClock(), tmp_path / "gone.conf")
    with pytest.raises(Exception, match=r"gone\.conf"):
        finished(live.change({"regionId": "new"}))
    assert live.current == BrokerConfig()


def test_the_address_server_is_asked_only_without_addresses() -> None:
    fetch = {"fetchNamesrvAddrByAddressServer": "true"}
    own = {"rmqAddressServerDomain": "names:81", "rmqAddressServerSubGroup": "a-unit?nofix=1"}
    for settings, sources in (
        ({}, ()),
        (own, ()),
        (fetch, ("http://jmenv.tbsite.net:8080/rocketmq/nsaddr",)),
        ({**fetch, **own}, ("http://names:81/rocketmq/a-unit?nofix=1",)),
        ({**fetch, "namesrvAddr": "a:1"}, ("a:1",)),
        ({"namesrvAddr": "https://web/ns;a:1"}, ("https://web/ns", "a:1")),
    ):
        assert parse(settings).registration.sources == sources
