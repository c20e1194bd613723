"""A slave copies its master's tables: ours immediately, an Apache master's every 10 s."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from brokers import BROKER_HOST, Client, client_of, config_at, running_broker, use_all_tables
from promotable import mastership_of
from turbopump.broker.broker import Broker
from turbopump.broker.config import IdentityConfig, ReplicationConfig, Role
from turbopump.broker.handlers.common import answer_with
from turbopump.broker.replication import table_copy
from turbopump.broker.replication.table_copy import (
    CopiedTable,
    TableCopies,
    copied_tables,
    log_begin,
)
from turbopump.errors import BodyError, ConnectionLost, RemoteError
from turbopump.machine.files import REAL_FILES
from turbopump.net.router import not_supported
from turbopump.supervisor import Supervisor
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_machine, virtual_time, wait_until
from turbopump.wire import headers, lenient_json
from turbopump.wire.bodies import GroupConfig, KeyValues
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.framing import FrameDecoder
from vectors import frame

SLAVE_HOST = "10.0.0.2"
SLAVE = IdentityConfig(
    broker_name="broker-a", broker_id=1, role=Role.SLAVE, bind_host=SLAVE_HOST, port=10911
)
FOLLOWS_MASTER = ReplicationConfig(master_address=f"{BROKER_HOST}:10912")


def create_topic(name: str, queues: int = 4) -> headers.CreateTopic:
    return headers.CreateTopic(
        topic=name,
        default_topic="TBW102",
        read_queue_nums=queues,
        write_queue_nums=queues,
        perm=6,
        topic_filter_type="SINGLE_TAG",
    )


@asynccontextmanager
async def master_and_slave(directory: Path) -> AsyncIterator[tuple[Broker, Client, Broker]]:
    network = MemoryNetwork()
    config = config_at(directory / "slave", identity=SLAVE, replication=FOLLOWS_MASTER)
    slave = Broker(config, network.host(SLAVE_HOST), virtual_machine(REAL_FILES, seed=2))
    async with running_broker(directory / "master", network) as (master, client), slave:
        yield master, client, slave


def are_equal(master: Broker, slave: Broker) -> bool:
    return (
        master.state.topics.snapshot == slave.state.topics.snapshot
        and master.state.groups.snapshot == slave.state.groups.snapshot
    )


@virtual_time()
async def test_topics_and_groups_are_copied_immediately(tmp_path: Path) -> None:
    async with master_and_slave(tmp_path) as (master, client, slave):
        await wait_until(lambda: are_equal(master, slave))
        began_s = virtual_loop().time()
        await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, create_topic("made"))
        await wait_until(lambda: "made" in slave.state.topics.table)
        group = GroupConfig(group_name="g", retry_max_times=3)
        await client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group.encode())
        await wait_until(lambda: slave.state.groups.table.get("g") == group)
        deletion = headers.TopicName(topic="made")
        await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, deletion)
        await wait_until(lambda: "made" not in slave.state.topics.table)
        assert virtual_loop().time() - began_s < 1
        assert are_equal(master, slave)


@virtual_time()
async def test_a_topic_that_was_re_created_while_the_slave_was_away_is_empty_there(
    tmp_path: Path,
) -> None:
    network = MemoryNetwork()
    config = config_at(tmp_path / "slave", identity=SLAVE, replication=FOLLOWS_MASTER)

    def new_slave() -> Broker:
        return Broker(config, network.host(SLAVE_HOST), virtual_machine(REAL_FILES, seed=2))

    async with running_broker(tmp_path / "master", network) as (master, client):
        await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, create_topic("T"))
        await client.send(b"copied")
        async with new_slave() as slave:
            await wait_until(lambda: slave.store.queue_range("T", 0)[1] == 1)
        await client.send(b"not yet copied")
        await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, headers.TopicName(topic="T"))
        await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, create_topic("T"))
        async with new_slave() as slave:
            await wait_until(lambda: slave.store.written_end == master.store.written_end)
            await wait_until(lambda: are_equal(master, slave))
            assert slave.store.queue_range("T", 0) == (0, 0)
            await client.send(b"new", queue_id=1)
            await wait_until(lambda: slave.store.queue_range("T", 1)[1] == 1)
            assert slave.store.queue_range("T", 0) == (0, 0)
        async with new_slave() as slave:
            ranges = [slave.store.queue_range("T", queue_id) for queue_id in range(2)]
            assert ranges == [(0, 0), (0, 1)]


@virtual_time()
async def test_a_re_created_topic_stays_empty_where_the_slave_cut_its_log(tmp_path: Path) -> None:
    async with master_and_slave(tmp_path) as (master, client, slave):
        for topic in ("T", "U"):
            await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, create_topic(topic))
        await client.send(b"first")
        second = master.store.written_end
        await client.send(b"second")
        await wait_until(lambda: slave.store.queue_range("T", 0)[1] == 2)
        await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, headers.TopicName(topic="T"))
        await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, create_topic("T"))
        await wait_until(lambda: are_equal(master, slave))
        follower = slave.replication.follower
        assert follower is not None
        follower._drop(second, "as the test wants it")
        # Its log has a gap now, so it connects again.
        await client.send(b"other", topic="U")
        await wait_until(lambda: slave.store.written_end == master.store.written_end, 60)
        await wait_until(lambda: slave.store.queue_range("T", 0) == (0, 0), 60)


@virtual_time()
async def test_copied_tables_survive_a_restart_of_the_slave(tmp_path: Path) -> None:
    async with master_and_slave(tmp_path) as (_, client, slave):
        await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, create_topic("made"))
        await wait_until(lambda: "made" in slave.state.topics.table)
        version = slave.state.topics.data_version
    alone = config_at(tmp_path / "slave", identity=SLAVE)
    machine = virtual_machine(REAL_FILES, seed=2)
    async with Broker(alone, MemoryNetwork().host(SLAVE_HOST), machine) as slave:
        assert "made" in slave.state.topics.table
        assert slave.state.topics.data_version == version


@virtual_time()
async def test_a_master_that_returns_is_copied_again(tmp_path: Path) -> None:
    network = MemoryNetwork()
    config = config_at(tmp_path / "slave", identity=SLAVE, replication=FOLLOWS_MASTER)
    slave = Broker(config, network.host(SLAVE_HOST), virtual_machine(REAL_FILES, seed=2))
    async with slave:
        for name in ("first", "second"):
            async with running_broker(tmp_path / "master", network) as (master, client):
                await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, create_topic(name))
                await wait_until(lambda: are_equal(master, slave))
        assert {"first", "second"} <= slave.state.topics.table.keys()


@virtual_time()
async def test_a_broker_with_held_copies_stops_immediately(tmp_path: Path) -> None:
    async with master_and_slave(tmp_path) as (master, _, slave):
        await wait_until(lambda: are_equal(master, slave))
        await asyncio.sleep(1)
        began_s = virtual_loop().time()
        await master.close()
        assert virtual_loop().time() - began_s < 0.4


@virtual_time()
async def test_known_tables_are_not_sent_again(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        running_broker(tmp_path, network) as (_, client),
        client_of(network, client.address) as slave,
    ):
        for code in (
            RequestCode.GET_ALL_TOPIC_CONFIG,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
            RequestCode.GET_ALL_CONSUMER_OFFSET,
            RequestCode.GET_ALL_DELAY_OFFSET,
            RequestCode.GET_ALL_CONSUMER_FILTERS,
        ):
            first = await slave.ask(code, headers.TableCopy(known_version=""))
            found = headers.TableCopyAnswer.from_ext_fields(first.ext_fields)
            assert first.body
            known = headers.TableCopy(known_version=found.table_version)
            again = await slave.ask(code, known)
            assert again.code == ResponseCode.SUCCESS
            assert not again.body
            assert headers.TableCopyAnswer.from_ext_fields(again.ext_fields) == found


@virtual_time()
async def test_a_change_between_a_request_and_its_wait_is_not_missed(tmp_path: Path) -> None:
    code = RequestCode.GET_ALL_TOPIC_CONFIG
    async with running_broker(tmp_path, MemoryNetwork()) as (master, client):
        first = await client.ask(code, headers.TableCopy(known_version=""))
        known = headers.TableCopyAnswer.from_ext_fields(first.ext_fields).table_version
        asked = request(code, headers.TableCopy(known_version=known, wait_millis=10_000))
        handle = master.administration.copied_tables.handlers()[code]
        held = handle(asked, cast("Any", None))
        # For example by a send that arrived in the same loop iteration.
        master.state.topics.create_internal("made", 1)
        began_s = virtual_loop().time()
        answer = await cast("Awaitable[Command]", held)
        assert b'"made"' in bytes(whole_body(answer))
        assert virtual_loop().time() - began_s < 1


TABLES_OF_APACHE_SLAVES = (
    "get_all_topic_config",
    "get_all_consumer_offset",
    "get_all_delay_offset",
    "get_all_subscriptiongroup_config",
)


def fields_of(table: dict[str, Any]) -> object:
    """Return the fields of a table, and those of one of its entries: names, or numbers."""
    [entries] = [key for key in table if key.endswith("Table")]
    entry = next(iter(table[entries].values()))
    keys = table[entries] if isinstance(entry, int) else entry
    names = {key if key.isidentifier() else "number" for key in map(str, keys)}
    return set(table), names


@pytest.mark.parametrize("port", [10911, 10909], ids=["normal port", "VIP port"])
@pytest.mark.parametrize("name", TABLES_OF_APACHE_SLAVES)
@virtual_time()
async def test_an_apache_slave_is_answered_as_recorded(
    tmp_path: Path, name: str, port: int
) -> None:
    [asked] = FrameDecoder().feed(frame(f"slave_sync_{name}.request"))
    [expected] = FrameDecoder().feed(frame(f"slave_sync_{name}.response"))
    network = MemoryNetwork()
    async with running_broker(tmp_path, network) as (master, client):
        await use_all_tables(client)
        await wait_until(lambda: master.path.delays.progress.offset_table, 60)
        answer = await client.pool.request(f"{BROKER_HOST}:{port}", asked, 3000)
        assert (answer.code, answer.remark) == (expected.code, expected.remark)
        assert not answer.ext_fields, "an Apache slave has not requested a version"
        got, recorded = (lenient_json.loads(whole_body(each)) for each in (answer, expected))
        assert fields_of(got) == fields_of(recorded)


@virtual_time()
async def test_filters_and_delay_progress_are_copied(tmp_path: Path) -> None:
    async with master_and_slave(tmp_path) as (master, client, slave):
        await use_all_tables(client)
        await wait_until(lambda: master.path.delays.progress.offset_table == {1: 1}, 60)
        await wait_until(lambda: slave.path.delays.progress.offset_table == {1: 1}, 60)
        await wait_until(lambda: slave.state.consumer_filters.find("g", "T") is not None, 60)
        copied = slave.state.consumer_filters.find("g", "T")
        assert copied is not None
        assert (copied.data.expression, copied.data.client_version) == ("n > 1", 5)
        await wait_until(lambda: slave.state.offsets.find("g", "T", 0) == 1, 60)


# --- with a scripted master -----------------------------------------------------------------------


class Master:
    """Answers requests for tables, and counts them."""

    def __init__(self, answer: Callable[[Command], Command]) -> None:
        self.answer = answer
        self.asked: list[int] = []

    async def request(self, _address: str, command: Command, _timeout_ms: int) -> Command:
        self.asked.append(command.code)
        return self.answer(command)


def recorded(command: Command) -> Command:
    """Answer as Apache RocketMQ 4.9.8 did."""
    name = RequestCode(command.code).name.lower()
    if command.code == RequestCode.GET_ALL_CONSUMER_FILTERS:
        return not_supported(command, None)  # type: ignore[arg-type]
    if command.code == RequestCode.GET_BROKER_RUNTIME_INFO:
        return answer_with(command, KeyValues(table={"commitLogMinOffset": "4096"}))
    [answer] = FrameDecoder().feed(frame(f"slave_sync_{name}.response"))
    return answer


@virtual_time()
async def test_an_apache_master_is_copied_every_ten_seconds(tmp_path: Path) -> None:
    async with running_broker(tmp_path, identity=replace(SLAVE, bind_host=BROKER_HOST)) as (
        slave,
        _,
    ):
        master = Master(recorded)
        mastership = mastership_of(slave)
        note_begin = mastership.note_master_begin
        tables = copied_tables(slave.state, slave.path.delays, slave.store, note_begin)
        copies = TableCopies(tables, master.request, lambda: slave.store.written_end, 1)
        work = Supervisor()
        copies.start(work)
        copies.follow("10.20.30.40:10911")
        await wait_until(lambda: len(copies.versions) == 5)
        assert mastership.record.master_begin == slave.store.kept_from() == 4096
        assert slave.state.topics.table["HaTopic"].read_queue_nums == 4
        assert slave.state.topics.data_version.counter == 25
        assert slave.state.groups.table["cg_push"].retry_max_times == 16
        assert slave.state.offsets.find("cg_push", "TopicTest", 1) == 4
        assert slave.path.delays.progress.offset_table == {1: 1, 2: 1, 3: 3}
        changes = slave.state.topics.saving.changes
        await asyncio.sleep(30.5)
        assert master.asked.count(RequestCode.GET_ALL_TOPIC_CONFIG) == 4
        assert slave.state.topics.saving.changes == changes
        await work.stop()


@pytest.mark.parametrize(
    ("text", "begin"), [("0", 0), ("1073741824", 1 << 30), ("-1", 0), ("9" * 19, None), ("", None)]
)
def test_where_the_log_of_a_master_begins(text: str, begin: int | None) -> None:
    info = KeyValues(table={"commitLogMinOffset": text}).encode()
    if begin is not None:
        assert log_begin(info) == begin
        return
    with pytest.raises(BodyError, match="commitLogMinOffset must be a position"):
        log_begin(info)


def versioned(version: str, log_end: int, body: bytes) -> Callable[[Command], Command]:
    header = headers.TableCopyAnswer(table_version=version, log_end=log_end, broker_epoch=0)
    return lambda command: command.answer(ResponseCode.SUCCESS, header, body=body)


def one_table(adopted: list[bytes], **changes: bool) -> CopiedTable:
    code = RequestCode.GET_ALL_CONSUMER_OFFSET
    return CopiedTable(
        what="offsets", code=code, adopt=lambda copy: adopted.append(copy.body), **changes
    )


@virtual_time()
async def test_offsets_wait_for_the_messages_they_refer_to() -> None:
    adopted: list[bytes] = []
    log_end = 100
    table = one_table(adopted, follows_log=True)
    copies = TableCopies([table], Master(versioned("1", 200, b"new")).request, lambda: log_end, 1)
    copies.follow("m:1")
    copying = asyncio.create_task(copies.copy_once(table))
    await asyncio.sleep(5)
    assert not adopted
    log_end = 200
    await copying
    assert adopted == [b"new"]


@virtual_time()
async def test_a_table_whose_log_never_arrives_is_dropped() -> None:
    adopted: list[bytes] = []
    table = one_table(adopted, follows_log=True)
    copies = TableCopies([table], Master(versioned("1", 200, b"new")).request, lambda: 100, 1)
    copies.follow("m:1")
    began_s = virtual_loop().time()
    await copies.copy_once(table)
    assert virtual_loop().time() - began_s == pytest.approx(table_copy.LOG_WAIT_MS / 1000, abs=1)
    assert (adopted, copies.versions) == ([], {})


@virtual_time()
async def test_an_answer_of_the_previous_master_is_not_adopted() -> None:
    adopted: list[bytes] = []
    table = one_table(adopted)
    release = asyncio.Event()

    async def ask(_address: str, command: Command, _timeout_ms: int) -> Command:
        await release.wait()
        return versioned("1", 0, b"old")(command)

    copies = TableCopies([table], ask, lambda: 0, 1)
    copies.follow("m:1")
    copying = asyncio.create_task(copies.copy_once(table))
    await asyncio.sleep(0)
    copies.follow("n:1")
    release.set()
    await copying
    assert adopted == []


@virtual_time()
async def test_failures_are_logged_once_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    adopted: list[bytes] = []
    table = one_table(adopted)
    master = Master(versioned("1", 0, b"table"))
    failing = True

    async def ask(address: str, command: Command, timeout_ms: int) -> Command:
        answer = await master.request(address, command, timeout_ms)
        if failing:
            raise ConnectionLost("m:1: gone")
        return answer

    work = Supervisor()
    copies = TableCopies([table], ask, lambda: 0, 1)
    copies.start(work)
    copies.follow("m:1")
    await asyncio.sleep(10)
    assert len(master.asked) == 4
    assert caplog.text.count("offsets are not copied from master m:1") == 1
    failing = False
    await wait_until(lambda: adopted == [b"table"])
    await work.stop()


@virtual_time()
async def test_a_rejection_by_the_master_is_an_error() -> None:
    table = one_table([])
    refusing = Master(lambda command: command.answer(ResponseCode.SYSTEM_ERROR, remark="no"))
    copies = TableCopies([table], refusing.request, lambda: 0, 1)
    copies.follow("m:1")
    with pytest.raises(RemoteError, match="no"):
        await copies.copy_once(table)
