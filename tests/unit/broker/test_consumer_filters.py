"""SQL92 subscriptions of groups: their versions, and the file that stores them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from broker_parts import FakeFile
from brokers import client_of, pulled, running_broker, views
from turbopump.broker import consumer_filters
from turbopump.broker.consumer_filters import KEPT_MS, ConsumerFilters
from turbopump.testing import MemoryNetwork, VirtualClock, virtual_time
from turbopump.wire.bodies import ConsumerData, Heartbeat, MessageModel, Subscription
from turbopump.wire.codes import RequestCode, ResponseCode
from vectors import DATA

JAVA_FILE = DATA / "store" / "config" / "consumerFilter.json"
NOW_MS = 1_794_728_200_000
MS_NS = 1_000_000


def wanted(expression: str, version: int, topic: str = "T", kind: str = "SQL92") -> Subscription:
    return Subscription(
        topic=topic, sub_string=expression, expression_type=kind, sub_version=version
    )


class StoredFilters:
    """The subscriptions of a broker that may be restarted."""

    def __init__(self, *, text: bytes | None = None) -> None:
        self.file = FakeFile()
        self.file.saved = [] if text is None else [text]
        self.clock = VirtualClock(NOW_MS)
        self.restart()

    def restart(self) -> None:
        self.filters = ConsumerFilters(self.file, self.clock)
        self.filters.load()

    def stop(self) -> None:
        self.filters.saving.save_now()

    def register(self, *subscriptions: Subscription, group: str = "g") -> None:
        self.filters.register(group, subscriptions)

    def expression(self, group: str = "g", topic: str = "T") -> str | None:
        found = self.filters.find(group, topic)
        return None if found is None else found.data.expression

    def is_dead(self, group: str = "g", topic: str = "T") -> bool:
        found = self.filters.find(group, topic)
        assert found is not None
        return found.data.is_dead

    def pass_ms(self, wait_ms: int) -> None:
        self.clock.advance_ns(wait_ms * MS_NS)


def test_a_file_of_rocketmq_is_read_and_written_as_it_was() -> None:
    text = JAVA_FILE.read_bytes()
    kept = StoredFilters(text=text)
    assert kept.expression("cg_sql", "Beta") == "i BETWEEN 3 AND 9 OR TAGS = '标签'"
    kept.stop()
    assert json.loads(kept.file.saved[-1]) == json.loads(text)


def test_a_subscription_is_written_as_rocketmq_writes_it() -> None:
    kept = StoredFilters()
    (java,) = json.loads(JAVA_FILE.read_bytes())["filterDataByTopic"].values()
    (row,) = java["groupFilterData"].values()
    kept.register(
        wanted(row["expression"], row["clientVersion"], row["topic"]), group=row["consumerGroup"]
    )
    kept.stop()
    (ours,) = json.loads(kept.file.saved[-1])["filterDataByTopic"].values()
    times = {"bornTime": NOW_MS, "dead": False, "deadTime": 0}
    assert ours == {**java, "groupFilterData": {row["consumerGroup"]: {**row, **times}}}


def test_only_a_newer_version_replaces_a_subscription() -> None:
    kept = StoredFilters()
    kept.register(wanted("a = 2", version=20))
    kept.register(wanted("a = 1", version=10))
    kept.register(wanted("a = 3", version=20))
    assert kept.expression() == "a = 2"
    kept.register(wanted("a = 4", version=21))
    assert kept.expression() == "a = 4"


def test_versions_survive_a_restart_and_the_absence_of_the_group() -> None:
    kept = StoredFilters()
    kept.register(wanted("a = 2", version=20))
    kept.stop()
    kept.restart()
    assert kept.is_dead()
    kept.register(wanted("a = 1", version=10))
    assert (kept.expression(), kept.is_dead()) == ("a = 2", True)
    kept.register(wanted("a = 2", version=20))
    assert not kept.is_dead()
    kept.filters.group_changed("g", None)
    assert kept.is_dead()
    kept.register(wanted("a = 1", version=10))
    assert kept.expression() == "a = 2"


def test_an_alive_subscription_counts_as_dead_since_30_seconds_before_a_start() -> None:
    kept = StoredFilters()
    kept.register(wanted("a = 2", version=20))
    kept.pass_ms(60_000)
    kept.stop()
    kept.restart()
    kept.filters.remove_expired()
    kept.pass_ms(KEPT_MS - 30_001)
    kept.filters.remove_expired()
    assert kept.expression() == "a = 2"
    kept.pass_ms(1)
    kept.filters.remove_expired()
    assert kept.expression() is None


def test_dead_subscriptions_are_removed_after_a_day_and_live_ones_never() -> None:
    kept = StoredFilters()
    kept.register(wanted("a = 2", version=20), wanted("b = 1", version=20, topic="U"))
    kept.register(wanted("b = 1", version=20, topic="U"))
    assert (kept.is_dead(), kept.is_dead(topic="U")) == (True, False)
    kept.pass_ms(KEPT_MS)
    kept.filters.remove_expired()
    assert (kept.expression(), kept.expression(topic="U")) == (None, "b = 1")
    kept.stop()
    assert list(json.loads(kept.file.saved[-1])["filterDataByTopic"]) == ["U"]


def test_tags_are_not_stored_and_replace_an_expression() -> None:
    kept = StoredFilters()
    kept.register(wanted("a", version=1, kind="TAG"))
    assert kept.expression() is None
    kept.register(wanted("a = 2", version=2))
    kept.register(wanted("a", version=3, kind="TAG"))
    assert kept.is_dead()


@pytest.mark.parametrize("expression", ["a >< 2", "a = '\ud800'"])
def test_a_newer_version_that_cannot_be_stored_removes_the_older_one(expression: str) -> None:
    kept = StoredFilters()
    kept.register(wanted("a = 2", version=20))
    kept.register(wanted(expression, version=21))
    assert kept.expression() is None
    kept.stop()
    assert json.loads(kept.file.saved[-1]) == {"filterDataByTopic": {}}


def test_an_unchanged_heartbeat_writes_nothing() -> None:
    kept = StoredFilters()
    kept.register(wanted("a = 2", version=20))
    kept.stop()
    for version in (20, 20, 10):
        kept.register(wanted("a = 2", version=version))
    assert not kept.filters.saving.is_dirty


def test_the_file_is_bounded_and_the_longest_dead_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer_filters, "FILTERS_MAX", 3)
    kept = StoredFilters()
    for number in range(3):
        kept.register(wanted("a = 1", version=1), group=f"g{number}")
    kept.register(wanted("a = 1", version=1), group="g3")
    assert kept.expression("g3") is None
    for number in (1, 0):
        kept.filters.group_changed(f"g{number}", None)
        kept.pass_ms(1)
    kept.register(wanted("a = 1", version=1), group="g3")
    assert [kept.expression(f"g{number}") for number in range(4)] == [
        "a = 1",
        None,
        "a = 1",
        "a = 1",
    ]


# --- through a broker -----------------------------------------------------------------------------


def beat(expression: str, version: int) -> bytes:
    data = ConsumerData(
        group_name="g",
        message_model=MessageModel.CLUSTERING,
        subscription_data_set=[wanted(expression, version)],
    )
    return Heartbeat(client_id="c", consumer_data_set=[data]).encode()


@virtual_time()
async def test_filtered_pulls_work_before_the_first_heartbeat_after_a_restart(
    tmp_path: Path,
) -> None:
    network = MemoryNetwork()
    async with running_broker(tmp_path, network) as (_, client):
        for number in range(4):
            await client.send(b"%d" % number, named={"n": str(number)})
        await client.ask(RequestCode.HEART_BEAT, body=beat("n >= 2", 20))
    saved = json.loads((tmp_path / "config" / "consumerFilter.json").read_bytes())
    assert saved["filterDataByTopic"]["T"]["groupFilterData"]["g"]["expression"] == "n >= 2"
    async with running_broker(tmp_path, network) as (_, client):
        answer = await client.pull(sys_flag=0, sub_version=20)
        assert [view.body for view in views(answer)] == [b"2", b"3"]


@virtual_time()
async def test_an_older_member_gets_the_newer_subscription_of_a_returning_group(
    tmp_path: Path,
) -> None:
    network = MemoryNetwork()
    async with running_broker(tmp_path, network) as (broker, client):
        for number in range(4):
            await client.send(b"%d" % number, named={"n": str(number)})
        async with client_of(network, broker.address, "10.0.0.8") as newer:
            await newer.ask(RequestCode.HEART_BEAT, body=beat("n = 3", 20))
        await client.ask(RequestCode.HEART_BEAT, body=beat("n = 1", 10))
        answer = await client.pull(sys_flag=0, sub_version=10)
        assert [view.body for view in views(answer)] == [b"3"]
        assert pulled(answer).next_begin_offset == 4


@pytest.mark.parametrize("text", ["{", "[1]", '{"filterDataByTopic": 5}'])
def test_a_damaged_file_is_logged_and_does_not_prevent_the_start(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config" / "consumerFilter.json"
    path.parent.mkdir()
    path.write_text(text)

    @virtual_time()
    async def check() -> None:
        async with running_broker(tmp_path) as (_, client):
            await client.send(b"x", named={"n": "1"})
            await client.ask(RequestCode.HEART_BEAT, body=beat("n = 1", 20))
            assert (await client.pull(sys_flag=0)).code == ResponseCode.SUCCESS
        assert "n = 1" in path.read_text()

    with caplog.at_level(logging.WARNING):
        check()
    assert "versions of SQL92 subscriptions are not kept over this restart" in caplog.text
    assert str(path) in caplog.text


@virtual_time()
async def test_a_damaged_file_is_replaced_by_its_backup(tmp_path: Path) -> None:
    path = tmp_path / "config" / "consumerFilter.json"
    path.parent.mkdir()
    path.write_text("{")
    path.with_name(path.name + ".bak").write_bytes(JAVA_FILE.read_bytes())
    async with running_broker(tmp_path) as (broker, _):
        assert broker.state.consumer_filters.find("cg_sql", "Beta") is not None
