"""The fault switches of the cluster that users test with: each does what it says."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from turbopump.aio import (
    ConsumeContext,
    ConsumeResult,
    Message,
    MessageView,
    Producer,
    PushConsumer,
    SendStatus,
)
from turbopump.client.producer_config import ProducerConfig
from turbopump.errors import ConnectFailed, InvalidArgument, NotRunning, RemoteError, TurbopumpError
from turbopump.testing import Cluster, running_cluster

FLUSH_FIRST = {"flushDiskType": "SYNC_FLUSH"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as made:
        yield made


@pytest.fixture
def careful(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose broker answers when messages are on disk."""
    with running_cluster(tmp_path, settings=FLUSH_FIRST) as made:
        yield made


def impatient(world: Cluster) -> Producer:
    """A producer without retries."""
    config = ProducerConfig(retries_max=0, wait_for_brokers=False)
    return Producer("shop", nameserver=world.nameserver, config=config)


class Billing:
    """A consumer of orders that records them."""

    def __init__(self, world: Cluster) -> None:
        self.bodies: list[bytes] = []
        self.consumer = PushConsumer(
            "billing",
            self.handle,
            nameserver=world.nameserver,
            subscriptions={"orders": "*"},
            start_from="first",
        )

    async def handle(
        self, messages: Sequence[MessageView], context: ConsumeContext
    ) -> ConsumeResult:
        self.bodies += [message.body for message in messages]
        return ConsumeResult.SUCCESS


def bodies(world: Cluster) -> list[bytes]:
    return [message.body for message in world.messages("orders")]


# --- brokers --------------------------------------------------------------------------------------


def test_data_in_the_operating_system_survives_a_crash(world: Cluster) -> None:
    async def crash() -> None:
        billing = Billing(world)
        async with billing.consumer:
            await world.send(Message("orders", b"1"))
            await world.crash()
            assert world.messages("orders") == []
            with pytest.raises(NotRunning, match="broker broker-a is down"):
                world.broker()
            await world.advance(minutes=1)
            await world.start_broker()
            assert bodies(world) == [b"1"]
            await world.send(Message("orders", b"2"))
            await world.until(lambda: {b"1", b"2"} <= set(billing.bodies), minutes=2)

    world.run(crash())
    assert bodies(world) == [b"1", b"2"]


def test_a_crash_is_not_a_clean_stop(world: Cluster) -> None:
    async def crash() -> Path:
        await world.send(Message("orders", b"1"))
        directory = world.broker().config.directory
        await world.crash()
        return directory

    directory = world.run(crash())
    assert world.disk().exists(directory / "abort")
    world.run(world.start_broker())
    world.run(world.stop_broker())
    assert not world.disk().exists(directory / "abort")


def test_a_power_loss_loses_unflushed_messages(world: Cluster) -> None:
    async def lose() -> None:
        await world.send(Message("orders", b"old"))
        await world.advance(seconds=15)
        await world.send(Message("orders", b"new"))
        assert bodies(world) == [b"old", b"new"]
        await world.crash(lose_unflushed=True)
        await world.start_broker()

    world.run(lose())
    assert bodies(world) == [b"old"]


def test_a_power_loss_loses_nothing_that_was_acknowledged(careful: Cluster) -> None:
    async def lose() -> None:
        await careful.send(*(Message("orders", b"%d" % number) for number in range(5)))
        await careful.crash(lose_unflushed=True)
        await careful.start_broker()

    careful.run(lose())
    assert bodies(careful) == [b"0", b"1", b"2", b"3", b"4"]


def test_consumers_resume_after_a_stop_and_a_start(world: Cluster) -> None:
    async def restart() -> list[bytes]:
        billing = Billing(world)
        async with billing.consumer:
            await world.send(Message("orders", b"1"))
            await world.until_consumed("billing")
            await world.stop_broker()
            await world.advance(minutes=5)
            await world.start_broker()
            await world.send(Message("orders", b"2"))
            await world.until_consumed("billing")
        return billing.bodies

    assert world.run(restart()) == [b"1", b"2"]


def test_unknown_brokers_are_named(world: Cluster) -> None:
    async def mistakes() -> None:
        with pytest.raises(InvalidArgument, match="'broker-x': there are broker-a"):
            await world.crash("broker-x")
        with pytest.raises(InvalidArgument, match="broker-a is already running"):
            await world.start_broker("broker-a")
        await world.stop_broker()
        with pytest.raises(NotRunning, match="start_broker"):
            await world.stop_broker()

    world.run(mistakes())


def test_a_broker_joins(world: Cluster) -> None:
    async def join() -> None:
        await world.start_broker("broker-b")
        await world.make_topic("orders", "broker-b", queues=1)
        await world.send(Message("orders", b"1"))

    world.run(join())
    assert world.broker("broker-b").queue_end("orders", 0) == 1


# --- network --------------------------------------------------------------------------------------


def test_connections_are_cut_and_reestablished(world: Cluster) -> None:
    async def cut() -> list[bytes]:
        billing = Billing(world)
        async with billing.consumer:
            await world.send(Message("orders", b"1"))
            await world.until_consumed("billing")
            assert world.cut("billing") >= 2, "to the broker and to the name server"
            assert world.cut("billing") == 0
            await world.send(Message("orders", b"2"))
            await world.until_consumed("billing")
            assert world.cut() > 0
            with pytest.raises(InvalidArgument, match="'biling': no broker, group or host"):
                world.cut("biling")
        return billing.bodies

    assert world.run(cut()) == [b"1", b"2"]


def test_a_client_is_isolated(world: Cluster) -> None:
    async def isolate() -> None:
        billing = Billing(world)
        async with billing.consumer:
            await world.send(Message("orders", b"1"))
            await world.until(lambda: billing.bodies == [b"1"])
            world.isolate("billing")
            await world.send(Message("orders", b"2"))
            await world.advance(minutes=10)
            assert billing.bodies == [b"1"]
            world.heal()
            await world.until(lambda: b"2" in billing.bodies, minutes=2)

    world.run(isolate())


def test_a_broker_is_isolated_from_later_clients_too(world: Cluster) -> None:
    async def isolate() -> None:
        await world.make_topic("orders")
        world.isolate("broker-a")
        async with impatient(world) as producer:
            with pytest.raises(TurbopumpError):
                await producer.send(Message("orders", b"1"))
            world.heal()
            await world.advance(minutes=2)
            await producer.send(Message("orders", b"2"))

    world.run(isolate())


def test_new_connections_are_refused(world: Cluster) -> None:
    async def refuse() -> None:
        await world.make_topic("orders")
        world.refuse()
        async with impatient(world) as producer:
            with pytest.raises(ConnectFailed, match="refused"):
                await producer.send(Message("orders", b"1"))
            world.heal()
            await world.advance(minutes=1)
            await producer.send(Message("orders", b"2"))

    world.run(refuse())
    assert bodies(world) == [b"2"]


# --- disk -----------------------------------------------------------------------------------------


def test_a_full_disk_rejects_messages_until_it_recovers(world: Cluster) -> None:
    async def fill() -> None:
        await world.send(Message("orders", b"1"))
        async with impatient(world) as producer:
            world.disk().fail_writes()
            with pytest.raises(RemoteError, match="No space left"):
                await producer.send(Message("orders", b"2"))
            world.heal()
            await world.advance(seconds=5)
            await producer.send(Message("orders", b"3"))

    world.run(fill())
    assert bodies(world) == [b"1", b"3"]


def test_a_nearly_full_disk_rejects_messages(world: Cluster) -> None:
    async def fill() -> None:
        await world.send(Message("orders", b"1"))
        world.disk().fullness = 0.95
        await world.advance(minutes=2)
        async with impatient(world) as producer:
            with pytest.raises(RemoteError, match="95% of the disk is used"):
                await producer.send(Message("orders", b"2"))

    world.run(fill())


def test_a_flush_that_fails_is_an_error_for_the_sender(careful: Cluster) -> None:
    async def fail() -> None:
        await careful.send(Message("orders", b"1"))
        careful.disk().fail_syncs(errno.EIO)
        async with impatient(careful) as producer:
            with pytest.raises(RemoteError, match="Input/output error"):
                await producer.send(Message("orders", b"2"))
            careful.disk().heal()
            await careful.advance(seconds=5)
            await producer.send(Message("orders", b"3"))

    careful.run(fail())
    assert b"3" in bodies(careful)


def test_a_failed_message_is_not_lost_when_the_flush_of_its_retry_fails(careful: Cluster) -> None:
    handled: list[int] = []

    async def handle(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        handled.append(messages[0].reconsume_times)
        if len(handled) > 1:
            return ConsumeResult.SUCCESS
        careful.disk().fail_syncs(errno.EIO)
        return ConsumeResult.RETRY_LATER

    async def fail() -> None:
        await careful.send(Message("orders", b"1"))
        consumer = PushConsumer(
            "billing",
            handle,
            nameserver=careful.nameserver,
            subscriptions={"orders": "*"},
            start_from="first",
        )
        async with consumer:
            await careful.until(lambda: handled)
            await careful.advance(seconds=2)
            careful.disk().heal()
            await careful.until(lambda: len(handled) == 2, minutes=2)

    careful.run(fail())


def test_a_slow_disk_makes_senders_wait_in_virtual_time(careful: Cluster) -> None:
    async def send() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        async with impatient(careful) as producer:
            await producer.send(Message("orders", b"1"))
            start_s = loop.time()
            await producer.send(Message("orders", b"2"))
            fast_s, start_s = loop.time() - start_s, loop.time()
            careful.disk().sync_time = 0.2
            await producer.send(Message("orders", b"3"))
            return fast_s, loop.time() - start_s

    fast_s, slow_s = careful.run(send())
    assert fast_s < 0.005
    assert slow_s == pytest.approx(0.2, abs=0.005)


@pytest.mark.parametrize("trouble", ["slow", "hung"])
def test_a_disk_that_is_slow_for_tables_delays_no_send(world: Cluster, trouble: str) -> None:
    async def send() -> None:
        loop, disk = asyncio.get_running_loop(), world.disk()
        await world.make_topic("orders")
        async with impatient(world) as producer:
            start_s = loop.time()
            if trouble == "slow":
                disk.sync_time = 1.5
            else:
                disk.stall()
            making = asyncio.create_task(world.make_topic("made"))
            for topic in ("orders", "by-a-send", "orders"):
                before_s = loop.time()
                await producer.send(Message(topic, b"1"))
                assert loop.time() - before_s < 0.05
            assert not making.done(), "an operator is notified when it is on disk"
            if trouble == "hung":
                disk.heal()
            await making
            assert (loop.time() - start_s > 1.5) == (trouble == "slow")
        disk.heal()
        await world.crash()
        await world.start_broker()
        assert {"made", "by-a-send"} <= world.broker().state.topics.table.keys()

    world.run(send())


def test_a_disk_that_hangs_is_reported_to_senders(careful: Cluster) -> None:
    async def hang() -> SendStatus:
        await careful.send(Message("orders", b"1"))
        careful.disk().stall()
        patient = ProducerConfig(retries_max=0, send_timeout=30)
        async with Producer("shop", nameserver=careful.nameserver, config=patient) as producer:
            receipt = await producer.send(Message("orders", b"2"))
        careful.disk().heal()
        await careful.until(lambda: bodies(careful) == [b"1", b"2"])
        return receipt.status

    assert careful.run(hang()) is SendStatus.FLUSH_DISK_TIMEOUT


@pytest.mark.parametrize("trouble", ["stall", "slow", "full", "crash"])
def test_a_sick_cluster_ends_quickly(tmp_path: Path, trouble: str) -> None:
    with running_cluster(tmp_path, settings=FLUSH_FIRST) as world:

        async def send() -> None:
            await world.make_topic("orders")
            match trouble:
                case "stall":
                    world.disk().stall()
                case "slow":
                    world.disk().sync_time = 60
                case "full":
                    world.disk().fail_writes()
                case "crash":
                    world.disk().stall()
                    await world.crash(lose_unflushed=True)
            async with impatient(world) as producer:
                with pytest.raises(TurbopumpError):
                    await producer.send(Message("orders", b"1"))

        world.run(send())
