"""A slave: how it finds its master, and what it rejects; in virtual time."""

from __future__ import annotations

from pathlib import Path

from broker_parts import IDENTITY, FakeFile
from brokers import BROKER_HOST, TIMEOUT_MS, running_broker
from turbopump.broker.config import BrokerConfig, IdentityConfig, Role
from turbopump.broker.registration import MasterAddress, Registration
from turbopump.broker.topics import Topics
from turbopump.net.pool import ConnectionPool
from turbopump.testing import MemoryNetwork, virtual_time
from turbopump.wire import headers
from turbopump.wire.bodies import GroupConfig
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.framing import FrameDecoder
from vectors import frame

SLAVE = IdentityConfig(
    broker_name="broker-a", broker_id=1, role=Role.SLAVE, bind_host=BROKER_HOST, port=10911
)


def command(name: str) -> Command:
    [decoded] = FrameDecoder().feed(frame(name))
    return decoded


NOBODY = headers.RegisterBrokerAnswer()


@virtual_time()
async def test_a_slave_rejects_sends_as_recorded(tmp_path: Path) -> None:
    async with running_broker(tmp_path, MemoryNetwork(), identity=SLAVE) as (broker, client):
        topics = dict(broker.state.topics.table)
        answer = await client.pool.request(
            client.address, command("slave_send_refused.request"), TIMEOUT_MS
        )
        recorded = command("slave_send_refused.response")
        assert answer.code == recorded.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert answer.ext_fields == recorded.ext_fields
        assert "messages are put to the slave" in (answer.remark or "")
        assert dict(broker.state.topics.table) == topics
        assert broker.store.written_end == 0


@virtual_time()
async def test_a_slave_rejects_changes_of_topics_and_groups_as_recorded(tmp_path: Path) -> None:
    recorded = command("slave_topic_create_refused.response")
    async with running_broker(tmp_path, MemoryNetwork(), identity=SLAVE) as (broker, client):
        topics, groups = dict(broker.state.topics.table), dict(broker.state.groups.table)
        group = GroupConfig(group_name="g", retry_max_times=3)
        for asked in (
            command("slave_topic_create_refused.request"),
            request(RequestCode.DELETE_TOPIC_IN_BROKER, headers.TopicName(topic="BenchmarkTest")),
            request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group.encode()),
            request(
                RequestCode.DELETE_SUBSCRIPTIONGROUP,
                headers.DeleteGroup(group_name="TOOLS_CONSUMER"),
            ),
        ):
            answer = await client.pool.request(client.address, asked, TIMEOUT_MS)
            assert (answer.code, answer.remark) == (recorded.code, recorded.remark)
            assert answer.ext_fields == recorded.ext_fields
        assert dict(broker.state.topics.table) == topics
        assert dict(broker.state.groups.table) == groups


@virtual_time()
async def test_a_slave_rejects_offsets(tmp_path: Path) -> None:
    commit = headers.UpdateConsumerOffset(
        consumer_group="g", topic="BenchmarkTest", queue_id=0, commit_offset=0
    )
    clone = headers.CloneGroupOffset(src_group="a", dest_group="b", topic="BenchmarkTest")
    async with running_broker(tmp_path, MemoryNetwork(), identity=SLAVE) as (broker, client):
        for code, header in (
            (RequestCode.UPDATE_CONSUMER_OFFSET, commit),
            (RequestCode.CLONE_GROUP_OFFSET, clone),
        ):
            answer = await client.ask(code, header)
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert "slave" in (answer.remark or "")
        assert not broker.state.offsets.snapshot.offset_table


@virtual_time()
async def test_a_slave_starts_neither_delays_nor_transaction_checks(tmp_path: Path) -> None:
    async with running_broker(tmp_path, MemoryNetwork(), identity=SLAVE) as (broker, _):
        names = {watch.name for watch in broker._work.watches}
        assert "retention" in names
        assert names.isdisjoint({"transaction checks", "clock watch", "delay progress"})


@virtual_time()
async def test_the_master_is_looked_up_at_name_servers() -> None:
    recorded = command("broker_register_slave.response").ext_fields
    answer = headers.RegisterBrokerAnswer.from_ext_fields(recorded)
    master = MasterAddress("10.20.30.40:10911", "10.20.30.40:10912")
    for identity, expected in ((SLAVE, master), (IDENTITY, None)):
        config = BrokerConfig(identity=identity)
        topics = Topics(config.topics, identity, FakeFile())
        async with ConnectionPool(MemoryNetwork().host("10.0.0.9")) as pool:
            registration = Registration(
                config=config,
                topics=topics,
                pool=pool,
                address="10.0.0.9:10911",
                ha_address="10.0.0.9:10912",
                name_servers=(),
            )
            told: list[MasterAddress] = []
            registration.listen_to_master(told.append)
            # A name server that has lost its table does not make a slave forget its master.
            for header in (NOBODY, answer, answer, NOBODY):
                registration.note_master(header)
        assert told == ([] if expected is None else [expected])
        assert registration.master == expected
