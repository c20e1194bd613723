from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from broker_parts import IDENTITY, FakeFile, finished
from turbopump.broker.config import IdentityConfig, TopicsConfig
from turbopump.broker.topics import Topics, check_shape, is_readable, is_writable
from turbopump.errors import InvalidArgument, RemoteError, StoreDamaged, WriteFailed
from turbopump.tables import TableFile
from turbopump.wire.bodies import TopicConfig, TopicConfigTable
from turbopump.wire.codes import ResponseCode
from turbopump.wire.names import (
    check_name,
    dead_letter_topic,
    is_forbidden_to_send,
    retry_topic,
)
from vectors import DATA


def made(
    file: TableFile | None = None,
    config: TopicsConfig | None = None,
    identity: IdentityConfig = IDENTITY,
    delay_levels: int = 18,
) -> Topics:
    topics = Topics(
        config or TopicsConfig(),
        identity,
        file or FakeFile(),
        delay_levels=delay_levels,
    )
    topics.load()
    return topics


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["T", "%RETRY%g", "a|b", "A-b_9", "x" * 127])
def test_good_names(name: str) -> None:
    assert check_name(name) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "blank"),
        (" \t", "blank"),
        ("a b", "illegal"),
        ("..", "illegal"),
        ("../../etc", "illegal"),
        ("a/b", "illegal"),
        ("a\\b", "illegal"),
        ("a\n", "illegal"),
        ("a\x00", "illegal"),
        ("主题", "illegal"),
        ("x" * 128, "longer"),
    ],
)
def test_bad_names(name: str, why: str) -> None:
    assert why in (check_name(name) or "")


@pytest.mark.slow
@given(st.text())
def test_valid_names_can_be_directory_names(name: str) -> None:
    if check_name(name) is None:
        assert Path("queues", name).parent == Path("queues")
        assert name not in {".", ".."}
        assert len(name.encode()) <= 127


def test_forbidden_and_derived_names() -> None:
    assert is_forbidden_to_send("SCHEDULE_TOPIC_XXXX")
    assert is_forbidden_to_send("RMQ_SYS_TRANS_HALF_TOPIC")
    assert not is_forbidden_to_send("BenchmarkTest")
    assert (retry_topic("g"), dead_letter_topic("g")) == ("%RETRY%g", "%DLQ%g")


# --- system topics --------------------------------------------------------------------------------


def test_topics_at_boot() -> None:
    table = made(config=TopicsConfig(trace_topic=True)).table
    found = {name: (t.read_queue_nums, t.write_queue_nums, t.perm) for name, t in table.items()}
    assert found == {
        "SELF_TEST_TOPIC": (1, 1, 6),
        "TBW102": (8, 8, 7),
        "BenchmarkTest": (1024, 1024, 6),
        "DefaultCluster": (16, 16, 7),
        "broker-a": (1, 1, 7),
        "OFFSET_MOVED_EVENT": (1, 1, 6),
        "SCHEDULE_TOPIC_XXXX": (18, 18, 6),
        "RMQ_SYS_TRACE_TOPIC": (1, 1, 6),
        "DefaultCluster_REPLY_TOPIC": (1, 1, 6),
    }


def test_topics_at_boot_follow_the_configuration() -> None:
    config = TopicsConfig(
        auto_create=False, cluster_topic=False, broker_topic=False, default_queues=3
    )
    table = made(config=config, delay_levels=30).table
    assert "TBW102" not in table
    assert "RMQ_SYS_TRACE_TOPIC" not in table
    assert table["DefaultCluster"].perm == 1
    assert table["broker-a"].perm == 1
    assert table["SCHEDULE_TOPIC_XXXX"].read_queue_nums == 30
    assert made(config=TopicsConfig(default_queues=3)).table["TBW102"].write_queue_nums == 3


def test_system_topics() -> None:
    topics = made()
    system = ("TBW102", "broker-a", "DefaultCluster", "rmq_sys_x", "RMQ_SYS_TRANS_HALF_TOPIC")
    for name in (*system, "DefaultCluster_REPLY_TOPIC"):
        assert topics.is_system(name)
    assert not topics.is_system("T")
    assert "TRANS_CHECK_MAX_TIME_TOPIC" in topics.system_names


# --- creating and changing ------------------------------------------------------------------------


def test_changes_do_not_copy_the_table() -> None:
    """Otherwise the cost of a change would grow with the number of topics."""
    topics = made()
    seen, saved = topics.table, topics.snapshot.topic_config_table
    topics.create_by_send("T", "TBW102", 4)
    assert "T" in seen
    finished(topics.update(TopicConfig(topic_name="U")))
    assert "U" in seen
    finished(topics.delete("T"))
    assert "T" not in seen
    assert "U" not in saved


def test_one_host_leaves_room_for_others() -> None:
    topics = made(config=TopicsConfig(topics_max=len(made().table) + 10))
    for number in range(5):
        assert topics.create_by_send(f"T{number}", "TBW102", 4, client="10.0.0.1:7") is not None
    with pytest.raises(RemoteError, match=r"clients at 10.0.0.1 have created 5 names") as caught:
        topics.create_by_send("U", "TBW102", 4, client="10.0.0.1:8")
    assert caught.value.code == ResponseCode.TOPIC_NOT_EXIST
    assert topics.create_by_send("T0", "TBW102", 4, client="10.0.0.1:8") is not None
    assert topics.create_by_send("U", "TBW102", 4, client="10.0.0.2:1") is not None
    finished(topics.delete("T0"))
    finished(topics.delete("T1"))
    assert topics.create_by_send("V", "TBW102", 4, client="10.0.0.1:8") is not None


def test_the_number_of_topics_is_bounded() -> None:
    most = len(made().table) + 2
    topics = made(config=TopicsConfig(topics_max=most))
    topics.create_by_send("T", "TBW102", 4)
    topics.create_internal("%RETRY%g", 1)
    attempts: list[Callable[[], object]] = [
        lambda: topics.create_by_send("U", "TBW102", 4),
        lambda: topics.create_internal("%RETRY%h", 1),
        lambda: topics.create_retries({"h": 1}),
    ]
    for refused in attempts:
        with pytest.raises(RemoteError, match=f"topicsMax is {most}") as caught:
            refused()
        assert caught.value.code == ResponseCode.TOPIC_NOT_EXIST
    with pytest.raises(InvalidArgument, match=f"topicsMax is {most}"):
        finished(topics.update(TopicConfig(topic_name="U")))
    finished(topics.update(TopicConfig(topic_name="T", read_queue_nums=2)))
    topics.create_retries({"g": 1})
    finished(topics.delete("T"))
    assert topics.create_by_send("U", "TBW102", 4) is not None


def test_a_send_creates_a_topic_like_the_template() -> None:
    topics = made()
    topic = topics.create_by_send("T", "TBW102", 4, 1)
    assert topic == TopicConfig(
        topic_name="T", read_queue_nums=4, write_queue_nums=4, perm=6, topic_sys_flag=1
    )
    assert topics.find("T") is topic
    assert topics.create_by_send("T", "TBW102", 2) is topic
    wide = topics.create_by_send("Wide", "TBW102", 100)
    assert wide is not None
    assert wide.write_queue_nums == 8


def test_a_send_creates_nothing_when_automatic_creation_is_off() -> None:
    topics = made()
    assert topics.create_by_send("T", "Nowhere", 4) is None
    assert topics.create_by_send("T", "BenchmarkTest", 4) is None, "it may not be inherited"
    assert topics.create_by_send("T", "TBW102", 0) is None
    assert topics.create_by_send("T", "TBW102", -1) is None
    assert topics.create_by_send("../T", "TBW102", 4) is None
    off = made(config=TopicsConfig(auto_create=False))
    assert off.create_by_send("T", "TBW102", 4) is None
    assert off.create_by_send("T", "DefaultCluster", 4) is not None
    assert off.data_version.counter == 1


def test_an_old_template_creates_nothing_when_automatic_creation_is_off() -> None:
    file = FakeFile()
    topics = made(file)
    topics.create_by_send("T", "TBW102", 4)
    topics.saving.save_now()
    off = made(file, TopicsConfig(auto_create=False))
    template = off.find("TBW102")
    assert template is not None
    assert template.perm == 6
    assert off.create_by_send("U", "TBW102", 4) is None


def test_retry_topics_are_created_by_a_send_anyway() -> None:
    topics = made(config=TopicsConfig(auto_create=False))
    topic = topics.create_by_send("%RETRY%g", "TBW102", 4, 2)
    assert topic is not None
    assert (topic.read_queue_nums, topic.perm, topic.topic_sys_flag) == (1, 6, 2)


def test_the_broker_creates_the_topics_it_needs() -> None:
    topics = made()
    topic = topics.create_internal("%DLQ%g", 1)
    assert (topic.write_queue_nums, topic.perm) == (1, 6)
    assert topics.create_internal("%DLQ%g", 9) is topic
    for name in ("%RETRY%../../x", "%RETRY%" + "g" * 121, ""):
        with pytest.raises(InvalidArgument, match="topic"):
            topics.create_internal(name, 1)
        with pytest.raises(InvalidArgument, match="topic"):
            finished(topics.update(TopicConfig(topic_name=name)))
    assert topics.data_version.counter == 1


def test_updates_keep_the_order_flag() -> None:
    topics = made()
    finished(topics.update(TopicConfig(topic_name="T", order=True)))
    topic = topics.find("T")
    assert topic is not None
    assert not topic.order
    topics.mark_ordered(frozenset({"T", "unknown"}))
    finished(topics.update(TopicConfig(topic_name="T", perm=4)))
    topic = topics.find("T")
    assert topic is not None
    assert (topic.order, topic.perm) == (True, 4)
    topics.mark_ordered(frozenset())
    assert not any(topic.order for topic in topics.table.values())


def test_deleting() -> None:
    topics = made()
    finished(topics.update(TopicConfig(topic_name="T")))
    assert finished(topics.delete("T"))
    assert topics.find("T") is None
    assert not finished(topics.delete("T"))
    assert topics.data_version.counter == 2


def test_listeners_are_notified_of_created_and_changed_topics() -> None:
    topics = made()
    heard: list[str] = []
    topics.listen(lambda topic: heard.append(topic.topic_name))
    topics.create_by_send("A", "TBW102", 4)
    topics.create_internal("B", 1)
    finished(topics.update(TopicConfig(topic_name="C")))
    topics.create_internal("B", 1)
    finished(topics.delete("C"))
    topics.mark_ordered(frozenset({"A"}))
    assert heard == ["A", "B", "C"]


def test_a_renewed_version_is_saved() -> None:
    file = FakeFile()
    topics = made(file)
    topics.renew_version()
    topics.saving.save_now()
    assert topics.data_version.counter == 1
    assert made(file).snapshot == topics.snapshot


def test_shapes() -> None:
    assert check_shape(TopicConfig(topic_name="T")) is None
    for changes in ({"read_queue_nums": -1}, {"write_queue_nums": 70_000}, {"perm": 8}):
        assert check_shape(replace(TopicConfig(topic_name="T"), **changes)) is not None
    assert is_readable(TopicConfig(topic_name="T", perm=4))
    assert not is_writable(TopicConfig(topic_name="T", perm=4))


# --- persistence ----------------------------------------------------------------------------------


def test_files_of_apache_rocketmq_are_read() -> None:
    topics = made(TableFile(DATA / "config" / "topics.json"))
    assert (topics.data_version.counter, topics.data_version.timestamp) == (8, 1794728151040)
    alpha = topics.find("Alpha")
    assert alpha is not None
    assert (alpha.read_queue_nums, alpha.perm) == (4, 6)
    saved = TopicConfigTable.decode((DATA / "config" / "topics.json").read_bytes())
    assert saved.topic_config_table.keys() <= topics.table.keys()


def test_changes_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "config" / "topics.json"
    topics = made(TableFile(path))
    assert not path.exists(), "nothing has changed yet"
    topics.create_by_send("T", "TBW102", 4)
    topics.mark_ordered(frozenset({"T"}))
    topics.saving.save_now()
    again = made(TableFile(path))
    assert again.table == topics.table
    assert again.data_version == topics.data_version
    assert again.data_version.counter == 2


def test_an_operators_change_that_cannot_be_saved_is_undone() -> None:
    file = FakeFile()
    topics = made(file)
    heard: list[TopicConfig] = []
    topics.listen(heard.append)
    finished(topics.update(TopicConfig(topic_name="A", perm=4)))
    file.full = True
    with pytest.raises(WriteFailed):
        finished(topics.update(TopicConfig(topic_name="A", perm=6)))
    with pytest.raises(WriteFailed):
        finished(topics.update(TopicConfig(topic_name="T")))
    assert topics.find("T") is None
    assert topics.table["A"].perm == 4
    assert [topic.topic_name for topic in heard] == ["A"]
    assert topics.saving.is_dirty, "the version has changed: name servers may have seen it"


def test_a_damaged_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    path.write_text("{ not json")
    with pytest.raises(StoreDamaged, match=r"topics\.json"):
        made(TableFile(path))
    path.write_text('{"dataVersion": 7}')
    with pytest.raises(StoreDamaged, match=r"topics\.json"):
        made(TableFile(path))


def test_the_backup_is_read_when_the_file_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    topics = made(TableFile(path))
    for name in ("A", "B"):
        topics.create_by_send(name, "TBW102", 4)
        topics.saving.save_now()
    path.write_text("")
    assert made(TableFile(path)).find("A") is not None
