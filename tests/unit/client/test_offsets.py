"""Offsets: in memory, on brokers, in local files, and when they may decrease."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from clusters import Recorder, cluster
from consumers import Seen, committed, consuming, make_topic, send, sleep_ms
from turbopump.client.offsets import (
    COMMIT_AGAIN_MS,
    CommitHistory,
    LocalOffsets,
    Positions,
    RemoteOffsets,
    offsets_path,
)
from turbopump.client.replicas import Replica
from turbopump.errors import RemoteError
from turbopump.machine.files import REAL_FILES
from turbopump.message import MessageQueue, QueueOffset
from turbopump.tables import TableFile
from turbopump.testing import virtual_machine, virtual_time, wait_until
from turbopump.wire import headers, lenient_json
from turbopump.wire.bodies import DataVersion, QueueOffsets
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, request
from vectors import DATA

QUEUE = MessageQueue("T", "a", 0)
OTHER = MessageQueue("T", "a", 1)


def test_positions_only_advance_unless_replaced() -> None:
    positions = Positions()
    positions.advance(QUEUE, QueueOffset(5))
    positions.advance(QUEUE, QueueOffset(3))
    assert positions.of(QUEUE) == 5
    positions.replace(QUEUE, QueueOffset(2))
    assert positions.of(QUEUE) == 2
    assert positions.all_of("T") == {QUEUE: 2}
    positions.forget(QUEUE)
    assert positions.of(QUEUE) is None


def read_offsets(path: Path) -> dict[MessageQueue, int]:
    saved = TableFile(path).load(QueueOffsets)
    return {} if saved is None else saved.offset_table


def write_offsets(path: Path, offsets: Mapping[MessageQueue, QueueOffset]) -> None:
    body = QueueOffsets(offset_table=dict(offsets)).encode(bare_keys=True)
    TableFile(path, is_verbatim=True).save(body, DataVersion())


def test_a_file_of_apache_rocketmq_is_read() -> None:
    found = read_offsets(DATA / "config" / "client_local_offsets.json")
    queues = {MessageQueue("TopicTest", "broker-a", number) for number in range(4)}
    assert set(found) == queues
    assert found[MessageQueue("TopicTest", "broker-a", 0)] == 10


@virtual_time()
async def test_the_file_has_the_format_of_apache_rocketmq(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    store = LocalOffsets(path, virtual_machine(REAL_FILES))
    await store.open()
    store.positions.advance(QUEUE, QueueOffset(7))
    await store.persist([QUEUE])
    store.close()
    # Java reads a whole object as a key; written as text it would not be one.
    assert path.read_text() == ('{"offsetTable":{{"topic":"T","brokerName":"a","queueId":0}:7}}')
    assert lenient_json.loads(path.read_bytes())
    assert read_offsets(path) == {QUEUE: 7}


@pytest.mark.parametrize("backup", ['{"offsetTable":', None])
@virtual_time()
async def test_an_unreadable_file_does_not_prevent_a_consumer_from_starting(
    tmp_path: Path, backup: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "offsets.json"
    path.write_text('{"offsetTable":')
    if backup is not None:
        (tmp_path / "offsets.json.bak").write_text(backup)
    store = LocalOffsets(path, virtual_machine(REAL_FILES))
    await store.open()
    assert await store.stored(QUEUE) is None
    store.close()
    assert "broadcasting starts without stored offsets" in caplog.text


def test_where_a_file_lies(tmp_path: Path) -> None:
    assert offsets_path(tmp_path, "1.2.3.4@DEFAULT", "g") == (
        tmp_path / "1.2.3.4@DEFAULT" / "g" / "offsets.json"
    )
    assert offsets_path(None, "c", "g").parts[-4:] == (
        ".rocketmq_offsets",
        "c",
        "g",
        "offsets.json",
    )


@virtual_time()
async def test_offsets_of_other_queues_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "g" / "offsets.json"
    write_offsets(path, {OTHER: QueueOffset(9)})
    store = LocalOffsets(path, virtual_machine(REAL_FILES))
    await store.open()
    store.positions.advance(QUEUE, QueueOffset(4))
    await store.persist([QUEUE])
    assert read_offsets(path) == {OTHER: 9, QUEUE: 4}
    assert await store.stored(OTHER) == 9
    store.close()


@virtual_time()
async def test_a_directory_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = LocalOffsets(tmp_path / "file" / "offsets.json", virtual_machine(REAL_FILES))
    await store.open()
    store.positions.advance(QUEUE, QueueOffset(4))
    await store.persist([QUEUE])
    assert "cannot be saved until this is fixed" in caplog.text


@virtual_time()
async def test_offsets_that_could_not_be_written_are_retried(
    tmp_path: Path,
) -> None:
    (tmp_path / "g").write_text("")
    store = LocalOffsets(tmp_path / "g" / "offsets.json", virtual_machine(REAL_FILES))
    await store.open()
    store.positions.advance(QUEUE, QueueOffset(4))
    await store.persist([QUEUE])
    # A queue that is released before the next attempt keeps its offset.
    store.positions.forget(QUEUE)
    assert await store.stored(QUEUE) == 4
    assert store.has_uncommitted([OTHER])
    (tmp_path / "g").unlink()
    await store.persist([OTHER], is_routine=True)
    assert read_offsets(tmp_path / "g" / "offsets.json") == {QUEUE: 4}
    assert not store.has_uncommitted([OTHER])


@virtual_time()
async def test_offsets_are_committed_every_five_seconds_and_on_close(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        recorder, seen = Recorder(), Seen()

        def mine() -> list[int]:
            commits = [
                headers.UpdateConsumerOffset.from_ext_fields(each.ext_fields)
                for each in recorder.of(RequestCode.UPDATE_CONSUMER_OFFSET)
            ]
            return [
                each.commit_offset for each in commits if (each.topic, each.queue_id) == ("T", 0)
            ]

        await send(world, [b"x"], to=QUEUE)
        async with consuming(world, seen, session=world.session(hooks=[recorder])):
            await sleep_ms(11_000)
            for count in range(2, 6):
                await send(world, [b"x"], to=QUEUE)
                await sleep_ms(5000)
                assert mine() == list(range(1, count + 1))
            await send(world, [b"x"], to=QUEUE)
            await wait_until(lambda: seen.count == 6)
        assert await committed(world) == 6


@virtual_time()
async def test_an_unchanged_offset_is_committed_twice_and_then_occasionally(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"] * 3, to=QUEUE)
        recorder, seen = Recorder(), Seen()
        async with consuming(world, seen, session=world.session(hooks=[recorder])):
            await sleep_ms(26_000)
            told = len(recorder.of(RequestCode.UPDATE_CONSUMER_OFFSET))
            offsets = world.broker().state.offsets
            assert offsets.of_topic("g", "T")[0] == 3
            offsets.remove_group("g")
            await sleep_ms(COMMIT_AGAIN_MS)
            assert offsets.of_topic("g", "T")[0] == 3, "restored what the broker had lost"
            again = len(recorder.of(RequestCode.UPDATE_CONSUMER_OFFSET))
            assert again - told == told // 2


def test_a_repeated_commit_settles_an_offset_for_a_while() -> None:
    told = CommitHistory()
    assert not told.is_settled(QueueOffset(3), 0)
    told.note(QueueOffset(3), 0)
    assert not told.is_settled(QueueOffset(3), 5000), "no broker has confirmed it"
    told.note(QueueOffset(3), 5000)
    assert told.is_settled(QueueOffset(3), 10_000)
    assert not told.is_settled(QueueOffset(4), 10_000)
    assert not told.is_settled(QueueOffset(3), 5000 + COMMIT_AGAIN_MS)
    told.note(QueueOffset(2), 10_000)
    assert not told.is_settled(QueueOffset(2), 10_000), "a reset decreased it"


@pytest.mark.parametrize("orderly", [False, True])
@virtual_time()
async def test_a_reset_rewinds_and_redelivers_everything(tmp_path: Path, orderly: bool) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"%d" % number for number in range(20)])
        start_ms = world.clock.now_ms() - 1_000_000
        seen = Seen()
        async with consuming(world, seen, orderly=orderly) as consumer:
            await wait_until(lambda: seen.count == 20)
            await consumer.commit()
            async with world.session("10.0.9.7") as session:
                header = headers.ResetOffset(
                    topic="T", group="g", timestamp=start_ms, is_force=True
                )
                command = request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
                answer = await session.request(world.brokers["a"].address, command, 5000)
                assert answer.code == 0, answer
            await sleep_ms(9000)
            assert seen.count == 20
            await wait_until(lambda: seen.count == 40, 60)
        assert [await committed(world, number) for number in range(4)] == [5] * 4


@virtual_time()
async def test_a_reset_waits_for_an_orderly_listener_that_runs(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"0", b"1"], to=QUEUE)
        seen = Seen()
        async with consuming(world, seen, orderly=True) as consumer:
            await wait_until(lambda: seen.count == 2)
            seen.hold.clear()
            await send(world, [b"2"], to=QUEUE)
            await wait_until(lambda: seen.running == 1)
            async with asyncio.TaskGroup() as group:
                group.create_task(consumer.reset_offsets("T", {QUEUE: QueueOffset(1)}))
                await sleep_ms(60_000)
                assert seen.running == 1
                seen.hold.set()
            await wait_until(lambda: seen.count == 5)
        assert seen.bodies == [b"0", b"1", b"2", b"1", b"2"]
        assert seen.running_max == 1


@virtual_time()
async def test_an_offset_beyond_the_queue_is_corrected(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"] * 3, to=QUEUE)
        # Left from before a crash removed the end of the queue: a broker rejects such a commit.
        world.brokers["a"].state.offsets.commit("g", "T", 0, 1000)
        seen = Seen()
        async with consuming(world, seen):
            await sleep_ms(9000)
            await send(world, [b"later"], to=QUEUE)
            await sleep_ms(5000)
            # Apache RocketMQ goes to the end of the queue as it was at the time of the request.
            assert seen.bodies == [b"later"]
            await sleep_ms(5000)
            assert await committed(world) == 4


@virtual_time()
async def test_an_error_does_not_count_as_no_offset(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"] * 3, to=QUEUE)
        seen, recorder = Seen(), Recorder()

        def refuse(address: str, command: Command) -> None:
            if command.code == RequestCode.QUERY_CONSUMER_OFFSET:
                raise RemoteError(1, "as the test wants it")

        recorder.refuse = refuse
        session = world.session(hooks=[recorder])
        async with consuming(world, seen, session=session, start_from="last") as consumer:
            assert consumer.assignment() == []
            recorder.refuse = None
            # At the next rebalance the broker answers, and a young queue starts at its beginning.
            await wait_until(lambda: seen.count == 3, 25)


@pytest.mark.parametrize("compared", [0, 1], ids=["another queue", "the queue itself"])
@pytest.mark.parametrize(
    "changed",
    [QueueOffset(1), QueueOffset(5), None],
    ids=["went back", "advanced", "was lost"],
)
@virtual_time()
async def test_a_queue_that_changes_while_a_broker_is_compared(
    tmp_path: Path, compared: int, changed: QueueOffset | None
) -> None:
    """The previous position would make the next owner skip messages.

    Or it would be lower than what a pull has committed in the meantime.
    """
    recorder = Recorder()
    async with cluster(tmp_path) as world, world.session(hooks=[recorder]) as session:
        await make_topic(world)
        await session.route("T")
        store = RemoteOffsets(session, "g")
        queues = [MessageQueue("T", next(iter(world.brokers)), number) for number in range(2)]
        for queue in queues:
            store.positions.advance(queue, QueueOffset(3))

        async def compare(queue: MessageQueue, _: Replica, position: QueueOffset) -> QueueOffset:
            if queue != queues[compared]:
                pass
            elif changed is None:
                store.positions.forget(queues[1])
            else:
                store.positions.replace(queues[1], changed)
            return position

        store.offset_to_commit = compare
        await store.persist(queues)
        sent = [
            headers.UpdateConsumerOffset.from_ext_fields(command.ext_fields)
            for command in recorder.of(RequestCode.UPDATE_CONSUMER_OFFSET)
        ]
        second = {} if changed is None else {1: changed}
        assert {each.queue_id: each.commit_offset for each in sent} == {0: 3, **second}


@virtual_time()
async def test_an_idle_consumer_has_no_uncommitted_offsets(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, world.session() as session:
        await make_topic(world)
        await session.route("T")
        store = RemoteOffsets(session, "g")
        queue = MessageQueue("T", next(iter(world.brokers)), 0)
        assert not store.has_uncommitted([queue]), "no position yet"
        store.positions.advance(queue, QueueOffset(3))
        assert store.has_uncommitted([queue])
        await store.persist([queue])
        assert store.has_uncommitted([queue]), "committed once"
        await store.persist([queue])
        assert not store.has_uncommitted([queue])
        store.positions.advance(queue, QueueOffset(3))
        assert not store.has_uncommitted([queue]), "nothing new"
        store.positions.advance(queue, QueueOffset(4))
        assert store.has_uncommitted([queue])
        store.positions.replace(queue, QueueOffset(3))
        assert not store.has_uncommitted([queue])
        await sleep_ms(COMMIT_AGAIN_MS)
        assert store.has_uncommitted([queue]), "committed again after a while"
