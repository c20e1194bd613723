"""Where micro-batches of a stream end, decided over a simulated cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from typing import Any, TypeVar, cast

import pytest

from turbopump.errors import ConnectionLost, DataLost, NoRoute, SparkError
from turbopump.message import MessageQueue
from turbopump.spark.reading.cluster import Cluster
from turbopump.spark.reading.micro_batch_planner import MicroBatchPlanner
from turbopump.spark.reading.offsets import NOTHING_BELOW, Limits, Mark, Offsets, Place
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.partition_planner import ranges_between
from turbopump.spark.reading.positions import Earliest, OfGroup, Position
from turbopump.spark.reading.unreadable_queues import Unreadable
from turbopump.testing import virtual_loop, virtual_time

T = TypeVar("T")

Q0, Q1, Q2 = (MessageQueue("t", "a", number) for number in range(3))


class MadeUp:
    """A cluster of queues with ends."""

    def __init__(self, ends: dict[MessageQueue, Limits]) -> None:
        self.ends = ends
        self.away: set[MessageQueue] = set()
        self.has_route = True
        self.routeless: set[MessageQueue] = set()
        self.group: dict[MessageQueue, int] = {}
        self.commits: list[Offsets] = []
        self.looks = 0
        self.waits: list[tuple[Offsets, int]] = []
        self.arriving: dict[MessageQueue, Limits] = {}
        self.unreadable_now: dict[MessageQueue, Unreadable] = {}
        self.is_deaf = False
        self.life = dict.fromkeys(ends, 0)
        """How often each queue was re-created."""
        self.unmarked: set[MessageQueue] = set()
        self.marked: list[Offsets] = []

    async def queues(self) -> tuple[MessageQueue, ...]:
        if not self.has_route:
            raise NoRoute("nobody knows t")
        return await self.known_queues()

    async def known_queues(self, at: Offsets | None = None) -> tuple[MessageQueue, ...]:
        return tuple(sorted(self.ends.keys() - self.routeless)) if self.has_route else ()

    async def unreadable(
        self, queues: Iterable[MessageQueue], doubtful: Collection[MessageQueue]
    ) -> dict[MessageQueue, Unreadable]:
        assert {queue for queue in queues if queue in self.routeless} <= set(doubtful)
        found = self.unreadable_now
        return {queue: found[queue] for queue in queues if queue in found and queue in doubtful}

    async def limits(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, Limits]:
        wanted = list(queues)
        for queue in wanted:
            if queue in self.away:
                raise ConnectionLost(f"{queue} is away")
        return {queue: self.ends[queue] for queue in wanted}

    def newest(self) -> dict[MessageQueue, int]:
        """Return what differs once a queue is re-created."""
        return dict(self.life)

    async def known_limits(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, Limits]:
        self.looks += 1
        return {
            queue: self.ends[queue]
            for queue in queues
            if queue in self.ends and queue not in self.away
        }

    async def resolve(
        self, name: str, position: Position, queues: Iterable[MessageQueue]
    ) -> dict[MessageQueue, int]:
        assert name == "startingOffsets"
        is_early = position in (Earliest(), OfGroup(Earliest()))
        found = {
            queue: self.ends[queue].low if is_early else self.ends[queue].high for queue in queues
        }
        if isinstance(position, OfGroup):
            found |= {queue: at for queue, at in self.group.items() if queue in found}
        return found

    async def commit(self, offsets: Offsets) -> Offsets:
        self.commits.append(dict(offsets))
        noted = {queue: at for queue, at in offsets.items() if queue not in self.away}
        if self.is_deaf:
            return {}
        self.group |= noted
        return noted

    def lost_commits(self) -> frozenset[Place]:
        return frozenset()

    async def stored_offsets(self, queues: Iterable[MessageQueue]) -> Offsets:
        return {queue: self.group[queue] for queue in queues if queue in self.group}

    async def marks(self, offsets: Offsets) -> dict[MessageQueue, Mark | None]:
        self.marked.append(dict(offsets))
        return {
            queue: (self.life.get(queue, 0), at - 1) if at > self.ends[queue].low else None
            for queue, at in offsets.items()
            if queue not in self.unmarked
        }

    async def all_marks(self, offsets: Offsets) -> dict[MessageQueue, Mark | None]:
        if refused := self.unmarked & offsets.keys():
            raise SparkError(f"{min(refused)}: cannot look up the last message")
        return await self.marks(offsets)

    def delete(self, queue: MessageQueue) -> None:
        """Delete it like brokers that keep the group's offset."""
        del self.ends[queue]
        self.unreadable_now[queue] = Unreadable.DELETED

    def make(self, queue: MessageQueue, limits: Limits) -> None:
        self.ends[queue] = limits
        del self.unreadable_now[queue]

    async def bytes_per_row(self, offsets: Offsets) -> dict[MessageQueue, int]:
        return {queue: 100 if queue == Q0 else 10 for queue in offsets}

    async def wait_for_messages(self, at: Offsets, wait_ms: int) -> bool:
        self.waits.append((dict(at), wait_ms))
        await asyncio.sleep(wait_ms / 1000)
        self.ends |= self.arriving
        return bool(self.arriving)


def following(cluster: MadeUp, **options: str) -> MicroBatchPlanner:
    given = {"nameserver": "127.0.0.1:1", **({} if "assign" in options else {"topic": "t"})}
    return MicroBatchPlanner(
        cast("Cluster", cluster), SourceOptions.for_stream(given | options), virtual_loop().clock
    )


async def latest(following: MicroBatchPlanner, start: Offsets, *, is_limited: bool = True) -> Any:
    return await following.latest(start, is_limited=is_limited)


@virtual_time()
async def test_the_first_batch_only_records_where_the_stream_starts() -> None:
    cluster = MadeUp({Q0: Limits(3, 10), Q1: Limits(0, 0)})
    assert await latest(following(cluster, startingOffsets="earliest"), {}) == {Q0: 3, Q1: 0}
    follow = following(cluster)
    start = await latest(follow, {})
    assert start == {Q0: 10, Q1: 0}
    cluster.ends[Q1] = Limits(0, 5)
    assert await latest(follow, start) == {Q0: 10, Q1: 5}


@virtual_time()
async def test_queues_created_after_a_stream_started_without_any_are_read_completely() -> None:
    cluster = MadeUp({})
    assert await latest(following(cluster), {}) == {}
    cluster.ends = {Q0: Limits(2, 10)}
    # Another process resumes from the checkpoint.
    follow = following(cluster)
    start = await follow.latest({}, is_limited=True, has_begun=True)
    assert start == {Q0: 2}
    assert await latest(follow, start) == {Q0: 10}
    assert await latest(following(cluster), {}) == {Q0: 10}, "without one it starts at the latest"


@virtual_time()
async def test_an_unknown_topic_is_an_error_at_the_start_only() -> None:
    cluster = MadeUp({Q0: Limits(0, 4)})
    cluster.has_route = False
    with pytest.raises(NoRoute):
        await latest(following(cluster), {})
    assert await latest(following(cluster), {Q0: 1}) == {Q0: 4}


@virtual_time()
async def test_without_new_messages_it_waits_at_the_ends_of_the_queues() -> None:
    cluster = MadeUp({Q0: Limits(0, 4), Q1: Limits(0, 2)})
    follow = following(cluster, idleWait="300ms")
    start = {Q0: 4, Q1: 2}
    assert await latest(follow, start) == start
    assert cluster.waits == [(start, 300)]
    assert cluster.looks == 1, "nothing has woken it"
    cluster.arriving = {Q1: Limits(0, 3)}
    assert await latest(follow, start) == {Q0: 4, Q1: 3}


@virtual_time()
async def test_new_queues_are_recorded_first_and_read_from_their_beginning() -> None:
    cluster = MadeUp({Q0: Limits(0, 4), Q1: Limits(7, 9)})
    follow = following(cluster)
    first = await latest(follow, {Q0: 2})
    assert first == {Q0: 4, Q1: 7}
    assert await latest(follow, first) == {Q0: 4, Q1: 9}


@virtual_time()
async def test_queues_whose_broker_is_down_keep_their_offsets() -> None:
    cluster = MadeUp({Q0: Limits(0, 4), Q1: Limits(0, 9)})
    cluster.away = {Q1}
    assert await latest(following(cluster), {Q0: 2, Q1: 3}) == {Q0: 4, Q1: 3}


@virtual_time()
async def test_lost_messages_end_the_stream_or_are_skipped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = MadeUp({Q0: Limits(5, 9), Q1: Limits(0, 3)})
    start = {Q0: 2, Q1: 8}
    with pytest.raises(DataLost) as raised:
        await latest(following(cluster), start)
    assert "t@a:0 starts at offset 5" in str(raised.value)
    assert "t@a:1 ends at offset 3" in str(raised.value)
    assert "failOnDataLoss=false" in str(raised.value)
    follow = following(cluster, failOnDataLoss="false")
    with caplog.at_level(logging.WARNING):
        end = await latest(follow, start)
    assert "continuing without them" in caplog.text
    # Q1 returns to its beginning, and is read completely by the next batch.
    assert end == {Q0: 9, Q1: 0}
    again = await latest(follow, end)
    assert again == {Q0: 9, Q1: 3}
    assert [str(each) for each in ranges_between(start, end)] == ["t@a:0[2, 9)"]
    assert [str(each) for each in ranges_between(end, again)] == ["t@a:1[0, 3)"]


@virtual_time()
async def test_a_batch_keeps_its_limits() -> None:
    cluster = MadeUp({Q0: Limits(0, 900), Q1: Limits(0, 100), Q2: Limits(0, 1)})
    start = {Q0: 0, Q1: 0, Q2: 0}
    rows = following(cluster, maxOffsetsPerTrigger="100")
    assert await latest(rows, start) == {Q0: 90, Q1: 9, Q2: 1}
    assert await latest(rows, start, is_limited=False) == {Q0: 900, Q1: 100, Q2: 1}
    sized = following(cluster, maxBytesPerTrigger="1000")
    assert sum((await latest(sized, start)).values()) < 15
    both = following(cluster, maxBytesPerTrigger="1m", maxOffsetsPerTrigger="10")
    assert sum((await latest(both, start)).values()) == 10


@virtual_time()
async def test_a_small_batch_waits_for_more_up_to_a_limit() -> None:
    cluster = MadeUp({Q0: Limits(0, 5)})
    start = {Q0: 0}
    follow = following(cluster, minOffsetsPerTrigger="10", maxTriggerDelay="2s", idleWait="1s")
    assert await latest(follow, start) == start
    assert cluster.waits == [({Q0: 5}, 1000)]
    cluster.ends[Q0] = Limits(0, 10)
    assert await latest(follow, start) == {Q0: 10}
    cluster.ends[Q0] = Limits(0, 11)
    start = {Q0: 10}
    assert await latest(follow, start) == start
    # The time is over in the middle of the second wait.
    assert await latest(follow, start) == {Q0: 11}
    assert cluster.waits[-1] == ({Q0: 11}, 1000)


@virtual_time()
async def test_available_now_ends_where_the_queues_did() -> None:
    cluster = MadeUp({Q0: Limits(0, 5)})
    follow = following(
        cluster, startingOffsets="earliest", maxOffsetsPerTrigger="3", minOffsetsPerTrigger="3"
    )
    await follow.freeze()
    cluster.ends |= {Q0: Limits(0, 50), Q1: Limits(0, 7)}
    offsets = [await latest(follow, {})]
    while (end := await latest(follow, offsets[-1])) != offsets[-1]:
        offsets.append(end)
    assert [each[Q0] for each in offsets] == [0, 3, 5]
    assert cluster.waits == []


@virtual_time()
async def test_available_now_waits_for_queues_whose_broker_goes_down() -> None:
    cluster = MadeUp({Q0: Limits(0, 50), Q1: Limits(0, 70)})
    follow = following(cluster, startingOffsets="earliest")
    await follow.freeze()
    cluster.away = {Q1}
    with pytest.raises(ConnectionLost):
        await latest(follow, {Q0: 0, Q1: 0})
    cluster.away = set()
    assert await latest(follow, {Q0: 0, Q1: 0}) == {Q0: 50, Q1: 70}


@virtual_time()
async def test_available_now_names_missing_queues_of_the_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = MadeUp({Q0: Limits(0, 50), Q1: Limits(0, 70)})
    cluster.routeless = {Q1}
    follow = following(cluster)
    await follow.freeze()
    with pytest.raises(DataLost, match=r"t@a:1: the name servers do not know .*failOnDataLoss"):
        await latest(follow, {Q0: 0, Q1: 0})
    loose = following(cluster, failOnDataLoss="false")
    await loose.freeze()
    with caplog.at_level(logging.WARNING):
        assert await latest(loose, {Q0: 0, Q1: 0}) == {Q0: 50, Q1: 0}
    assert "t@a:1: the name servers do not know" in caplog.text


@virtual_time()
async def test_available_now_reads_no_queue_that_is_closed_or_deleted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = MadeUp({Q0: Limits(0, 50), Q1: Limits(0, 70), Q2: Limits(0, 9)})
    cluster.routeless = {Q1, Q2}
    cluster.unreadable_now = {Q1: Unreadable.CLOSED}
    cluster.ends.pop(Q2)
    start = {Q0: 0, Q1: 70}
    follow = following(cluster)
    await follow.freeze()
    assert await latest(follow, start) == {Q0: 50, Q1: 70}, "it was read to its end"
    follow = following(cluster)
    await follow.freeze()
    with pytest.raises(
        DataLost, match=r"t@a:1 cannot be read from offset 60: .*fewer queues to read"
    ):
        await latest(follow, {Q0: 0, Q1: 60})
    cluster.unreadable_now[Q2] = Unreadable.DELETED
    with pytest.raises(
        DataLost, match=r"t@a:2 cannot be read from offset 9: the topic was deleted;"
    ):
        await latest(follow, {Q0: 0, Q2: 9})
    loose = following(cluster, failOnDataLoss="false", group="g")
    await loose.freeze()
    with caplog.at_level(logging.WARNING):
        end = await latest(loose, {Q0: 0, Q1: 60, Q2: 9})
        assert await latest(loose, end) == end == {Q0: 50, Q1: 60}
    assert caplog.text.count("t@a:1 cannot be read") == 1
    assert cluster.commits[-2:] == [{Q2: 0}, {Q0: 50}], "if re-created, it starts from 0"


async def planned(follow: MicroBatchPlanner, start: Offsets) -> Offsets:
    """Plan a batch as Spark does, which commits the last one after requesting the next."""
    end = await follow.latest(start, is_limited=True)
    if end != start:
        await follow.commit(start)
    return end


@virtual_time()
@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_recreated_queue_is_read_completely(*, is_restarted: bool) -> None:
    cluster = MadeUp({Q0: Limits(0, 50), Q1: Limits(0, 10)})
    loose = {"failOnDataLoss": "false", "group": "g"}
    follow = following(cluster, **loose)
    at = await planned(follow, {Q0: 50, Q1: 9})
    assert await planned(follow, at) == at == {Q0: 50, Q1: 10}
    cluster.delete(Q1)
    at = await planned(follow, at)
    assert await planned(follow, at) == at == {Q0: 50}
    assert cluster.group == {Q0: 50, Q1: 0}
    cluster.make(Q1, Limits(0, 12))
    if is_restarted:
        follow = following(cluster, **loose)
    at = await planned(follow, at)
    assert at == {Q0: 50, Q1: 0}
    at = await planned(follow, at)
    assert await planned(follow, at) == at == {Q0: 50, Q1: 12}
    assert cluster.group == at


@virtual_time()
async def test_a_deleted_queue_is_dropped_once_the_broker_recorded_the_reset() -> None:
    cluster = MadeUp({Q0: Limits(0, 50), Q1: Limits(0, 10)})
    follow = following(cluster, failOnDataLoss="false", group="g")
    start = {Q0: 50, Q1: 10}
    assert await planned(follow, start) == start
    cluster.delete(Q1)
    cluster.is_deaf = True
    assert await planned(follow, start) == start
    assert cluster.waits[-1][0] == {Q0: 50}
    # It is re-created in between, and recognised as a different one.
    cluster.make(Q1, Limits(0, 12))
    at = await planned(follow, start)
    assert at == {Q0: 50, Q1: 0}
    assert await planned(follow, at) == {Q0: 50, Q1: 12}
    cluster.delete(Q1)
    assert await planned(follow, start) == start
    cluster.is_deaf = False
    assert await planned(follow, start) == {Q0: 50}
    assert cluster.group[Q1] == 0


@virtual_time()
async def test_an_empty_recreated_queue_is_committed_like_any() -> None:
    cluster = MadeUp({Q0: Limits(0, 50), Q1: Limits(0, 0)})
    follow = following(cluster, failOnDataLoss="false", group="g")
    start = {Q0: 50, Q1: 0}
    cluster.is_deaf = True
    cluster.delete(Q1)
    assert await planned(follow, start) == start
    cluster.make(Q1, Limits(0, 3))
    at = await planned(follow, start)
    cluster.is_deaf = False
    assert await planned(follow, at) == at == {Q0: 50, Q1: 3}
    assert cluster.group == at


@virtual_time()
async def test_without_commits_a_recreated_queue_does_not_resume_at_the_group_offset() -> None:
    cluster = MadeUp({Q0: Limits(0, 50), Q1: Limits(0, 10)})
    cluster.group = {Q1: 10}
    follow = following(cluster, failOnDataLoss="false", group="g", commitOffsets="false")
    cluster.delete(Q1)
    at = await planned(follow, {Q0: 50, Q1: 10})
    assert at == {Q0: 50}
    cluster.make(Q1, Limits(0, 12))
    assert await planned(follow, at) == {Q0: 50, Q1: 0}
    assert cluster.commits == []


@virtual_time()
async def test_a_recreated_closed_queue_is_read_from_its_beginning() -> None:
    cluster = MadeUp({Q0: Limits(0, 4), Q1: Limits(0, 0)})
    cluster.routeless = {Q1}
    cluster.unreadable_now = {Q1: Unreadable.CLOSED}
    with pytest.raises(DataLost, match="t@a:1 ends at offset 0 but was read to 7"):
        await latest(following(cluster), {Q0: 4, Q1: 7})
    assert await latest(following(cluster, failOnDataLoss="false"), {Q0: 4, Q1: 7}) == {
        Q0: 4,
        Q1: 0,
    }
    cluster.ends[Q1] = Limits(0, 0, is_certain=False)
    assert await latest(following(cluster), {Q0: 4, Q1: 7}) == {Q0: 4, Q1: 7}
    cluster.ends[Q1] = Limits(8, 8)
    assert await latest(following(cluster), {Q0: 4, Q1: 8}) == {Q0: 4, Q1: 8}


@virtual_time()
async def test_no_wait_includes_a_closed_queue() -> None:
    cluster = MadeUp({Q0: Limits(0, 4), Q1: Limits(0, 7)})
    cluster.routeless = {Q1}
    cluster.unreadable_now = {Q1: Unreadable.CLOSED}
    await latest(following(cluster), {Q0: 4, Q1: 7})
    assert [at for at, _ in cluster.waits] == [{Q0: 4}]


@virtual_time()
async def test_new_queues_are_found_however_long_it_waits() -> None:
    cluster = MadeUp({Q0: Limits(0, 4)})
    follow = following(cluster, idleWait="10m", discoveryInterval="5s")
    await latest(follow, {Q0: 4})
    assert cluster.waits == [({Q0: 4}, 5000)]


@virtual_time()
@pytest.mark.parametrize(
    ("options", "begin"),
    [
        ({"group": "g"}, 60),
        ({"group": "g", "startingOffsets": "latest"}, 60),
        ({"group": "g", "startingOffsets": "earliest"}, 5),
        ({"group": "g", "allowSharedGroup": "true", "commitOffsets": "false"}, 5),
        ({}, 5),
    ],
)
async def test_a_queue_added_later_resumes_at_the_group_offset(
    options: dict[str, str], begin: int
) -> None:
    cluster = MadeUp({Q0: Limits(0, 50), Q1: Limits(5, 70)})
    cluster.group, cluster.routeless = {Q1: 60}, {Q1}
    follow = following(cluster, **options)
    start = await latest(follow, {})
    assert Q1 not in start
    cluster.routeless = set()
    assert (await latest(follow, start))[Q1] == begin


@virtual_time()
async def test_only_changed_offsets_are_committed() -> None:
    cluster = MadeUp({Q0: Limits(0, 5), Q1: Limits(0, 5)})
    follow = following(cluster, group="billing", startingOffsets="earliest")
    await follow.commit({Q0: 1, Q1: 1})
    await latest(follow, {Q0: 1, Q1: 3})
    await follow.commit({Q0: 1, Q1: 3})
    assert cluster.commits == [{Q0: 1, Q1: 1}, {Q1: 3}]
    cluster.away = {Q0}
    await follow.commit({Q0: 2, Q1: 3})
    await follow.commit({Q0: 2, Q1: 3})
    assert cluster.commits[2:] == [{Q0: 2}, {Q0: 2}]
    silent = following(cluster, group="billing", commitOffsets="false")
    await silent.commit({Q0: 5})
    assert len(cluster.commits) == 4


@virtual_time()
async def test_a_running_stream_commits_moved_and_previously_rejected_offsets() -> None:
    cluster = MadeUp({Q0: Limits(0, 5), Q1: Limits(0, 5)})
    follow = following(cluster, group="billing", startingOffsets="earliest")
    at = await latest(follow, {Q0: 0, Q1: 0})
    cluster.away, cluster.ends[Q0] = {Q1}, Limits(0, 7)
    at = await latest(follow, at)
    cluster.away, cluster.ends[Q1] = set(), Limits(0, 6)
    at = await latest(follow, at)
    await follow.commit(at)
    await follow.commit(at)
    assert at == {Q0: 7, Q1: 6}
    assert cluster.commits == [{Q0: 0, Q1: 0}, {Q0: 5, Q1: 5}, {Q0: 7, Q1: 5}, {Q1: 6}]


@virtual_time()
async def test_the_lag_is_known_beside_what_is_read() -> None:
    cluster = MadeUp({Q0: Limits(0, 500)})
    follow = following(cluster, maxOffsetsPerTrigger="10")
    assert await latest(follow, {Q0: 0}) == {Q0: 10}
    assert follow.latest_known == {Q0: 500}


@virtual_time()
async def test_deselected_queues_keep_their_offsets() -> None:
    other = MessageQueue("u", "a", 0)
    cluster = MadeUp({Q0: Limits(0, 5), other: Limits(0, 9)})
    start = {Q0: 1, other: 2}
    follow = following(cluster, assign='{"t": [0]}')
    end = await latest(follow, start)
    assert end == {Q0: 5, other: 2}
    await latest(follow, end)
    assert cluster.waits[-1][0] == {Q0: 5}, "no wait includes the other"


@virtual_time()
async def test_a_slave_that_lags_is_no_loss() -> None:
    cluster = MadeUp({Q0: Limits(0, 5, is_certain=False)})
    assert await latest(following(cluster), {Q0: 7}) == {Q0: 7}


@virtual_time()
async def test_a_queue_recreated_and_filled_beyond_what_was_read_is_noticed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = MadeUp({Q0: Limits(0, 10), Q1: Limits(0, 5)})
    strict, loose = following(cluster), following(cluster, failOnDataLoss="false")
    start = await latest(strict, {})
    await latest(loose, {})
    assert start == {Q0: 10, Q1: 5}
    cluster.life[Q0], cluster.ends[Q0] = 1, Limits(0, 25)
    with pytest.raises(DataLost, match="t@a:0 was re-created: the message at offset 9 is not"):
        await latest(strict, start)
    back = await latest(loose, start)
    assert back == {Q0: 0, Q1: 5}
    assert "t@a:0 was re-created" in caplog.text
    assert ranges_between(start, back) == []
    end = await latest(loose, back)
    assert end == {Q0: 25, Q1: 5}
    cluster.ends[Q0] = Limits(0, 30)
    assert await latest(loose, end) == {Q0: 30, Q1: 5}


@virtual_time()
async def test_marks_are_read_from_the_checkpoint_and_old_ones_have_none() -> None:
    cluster = MadeUp({Q0: Limits(0, 20)})
    start, given = {Q0: 10}, {Q0: (7, 9)}
    for marks, is_noticed in (({}, False), (given, True)):
        planner = following(cluster)
        planning = planner.latest(start, is_limited=False, has_begun=True, marks=marks)
        if is_noticed:
            with pytest.raises(DataLost, match="re-created"):
                await planning
        else:
            assert await planning == {Q0: 20}
            assert planner.marks == {Q0: (0, 19)}


@virtual_time()
async def test_a_queue_that_cannot_be_checked_is_not_read_on() -> None:
    cluster = MadeUp({Q0: Limits(0, 10), Q1: Limits(0, 5)})
    planner = following(cluster)
    start = await latest(planner, {})
    cluster.ends = {Q0: Limits(0, 12), Q1: Limits(0, 7)}
    cluster.unmarked = {Q0}
    end = await latest(planner, start)
    assert end == {Q0: 10, Q1: 7}
    cluster.unmarked = set()
    assert await latest(planner, end) == {Q0: 12, Q1: 7}


@virtual_time()
@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_queue_recreated_with_as_many_messages_is_noticed(*, is_restarted: bool) -> None:
    cluster = MadeUp({Q0: Limits(0, 10), Q1: Limits(0, 5), Q2: Limits(0, 0)})
    strict, loose = following(cluster), following(cluster, failOnDataLoss="false")
    start = await latest(strict, {})
    assert await latest(loose, {}) == start
    for planner in (strict, loose):
        assert await latest(planner, start) == start
    marks = strict.marks
    cluster.life = dict.fromkeys(cluster.life, 1)
    # Nothing is known of the queue that was empty.
    cluster.ends[Q2] = Limits(0, 3)
    if is_restarted:
        strict, loose = following(cluster), following(cluster, failOnDataLoss="false")
    with pytest.raises(DataLost, match=r"t@a:0 was re-created.*t@a:1 was re-created"):
        await strict.latest(start, marks=marks)
    back = await loose.latest(start, marks=marks)
    assert back == {Q0: 0, Q1: 0, Q2: 3}
    assert await latest(loose, back) == {Q0: 10, Q1: 5, Q2: 3}


@virtual_time()
async def test_a_repeated_batch_has_no_messages_of_a_recreated_queue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = MadeUp({Q0: Limits(0, 50), Q1: Limits(0, 5), Q2: Limits(0, 5)})
    first = following(cluster, startingOffsets="earliest")
    start = await first.latest({Q0: 50, Q1: 5, Q2: 0}, marks={Q0: (0, 49), Q1: (0, 4)})
    start_marks = first.marks
    cluster.ends = {Q0: Limits(0, 100), Q1: Limits(0, 9), Q2: Limits(0, 7)}
    end = await latest(first, start)
    batch = start, end, start_marks, first.marks
    strict, loose = following(cluster), following(cluster, failOnDataLoss="false")
    for planner in (strict, loose):
        assert await planner.without_lost(*batch) == end, "nothing has happened"
    cluster.life[Q0], cluster.ends[Q0] = 1, Limits(0, 200)
    with pytest.raises(DataLost, match="t@a:0 was re-created: the message at offset 99 is not"):
        await strict.without_lost(*batch)
    assert await loose.without_lost(*batch) == {Q1: 9, Q2: 7}
    assert "t@a:0 was re-created" in caplog.text
    cluster.ends[Q0] = Limits(0, 80)
    with pytest.raises(DataLost, match="t@a:0 was re-created"):
        await strict.without_lost(*batch)
    cluster.life[Q0] = 0
    with pytest.raises(DataLost, match="t@a:0 ends at offset 80 but was read to 100"):
        await strict.without_lost(*batch)
    cluster.ends[Q0] = Limits(0, 80, is_certain=False)
    assert await strict.without_lost(*batch) == end, "its master may have more"
    cluster.away = cluster.unmarked = {Q0}
    assert await strict.without_lost(*batch) == end, "the task waits for the broker"


@virtual_time()
async def test_an_idle_stream_checks_nothing() -> None:
    cluster = MadeUp({Q0: Limits(0, 10)})
    planner = following(cluster)
    start = await latest(planner, {})
    assert await latest(planner, start) == start
    assert cluster.marked[1:] == [start], "the first look checks everything"
    cluster.marked.clear()
    for _ in range(3):
        assert await latest(planner, start) == start
    assert cluster.marked == []
    cluster.ends[Q0] = Limits(0, 11)
    assert await latest(planner, start) == {Q0: 11}
    assert cluster.marked == [start, {Q0: 11}]


# --- offsets without a message before them --------------------------------------------------------


@virtual_time()
async def test_a_stream_does_not_start_where_it_cannot_record_the_last_message() -> None:
    cluster = MadeUp({Q0: Limits(0, 10)})
    cluster.unmarked = {Q0}
    planner = following(cluster)
    for _ in range(2):
        with pytest.raises(SparkError, match="t@a:0: cannot look up the last message"):
            await latest(planner, {})
    cluster.unmarked = set()
    start = await latest(planner, {})
    assert (start, planner.marks) == ({Q0: 10}, {Q0: (0, 9)})
    cluster.life[Q0], cluster.ends[Q0] = 1, Limits(0, 25)
    with pytest.raises(DataLost, match="t@a:0 was re-created"):
        await latest(planner, start)


class Forgetful(MadeUp):
    """Finds the messages to compare, but not those to record."""

    async def marks(self, offsets: Offsets) -> dict[MessageQueue, Mark | None]:
        found = await super().marks(offsets)
        return {q: mark for q, mark in found.items() if offsets[q] <= 10 or q != Q0}


@virtual_time()
async def test_a_queue_does_not_advance_until_its_last_message_can_be_recorded() -> None:
    cluster = Forgetful({Q0: Limits(0, 10), Q1: Limits(0, 5)})
    planner = following(cluster, group="g")
    start = await latest(planner, {})
    cluster.ends = {Q0: Limits(0, 12), Q1: Limits(0, 7)}
    end = await latest(planner, start)
    assert end == {Q0: 10, Q1: 7}
    assert planner.marks == {Q0: (0, 9), Q1: (0, 6)}
    assert cluster.waits == []
    assert await latest(planner, end) == end
    assert len(cluster.waits) == 1, "it does not ask again immediately"
    assert cluster.group == end
    cluster.life[Q0], cluster.ends[Q0] = 1, Limits(0, 25)
    with pytest.raises(DataLost, match="t@a:0 was re-created: the message at offset 9 is not"):
        await latest(planner, end)


@virtual_time()
async def test_a_new_queue_is_added_once_its_last_message_can_be_recorded() -> None:
    cluster = MadeUp({Q0: Limits(0, 10), Q1: Limits(0, 70)})
    cluster.group, cluster.routeless = {Q1: 60}, {Q1}
    planner = following(cluster, group="g")
    start = await latest(planner, {})
    cluster.routeless, cluster.unmarked = set(), {Q1}
    assert await latest(planner, start) == start
    cluster.unmarked = set()
    end = await latest(planner, start)
    assert end == {Q0: 10, Q1: 60}
    assert planner.marks[Q1] == (0, 59)


@virtual_time()
async def test_available_now_waits_for_queues_that_cannot_be_checked() -> None:
    cluster = MadeUp({Q0: Limits(0, 10)})
    planner = following(cluster)
    start = await latest(planner, {})
    cluster.ends[Q0] = Limits(0, 20)
    await planner.freeze()
    cluster.unmarked = {Q0}
    with pytest.raises(SparkError, match="t@a:0: cannot look up the last message"):
        await latest(planner, start)


@virtual_time()
@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize(
    ("ends", "options"),
    [(Limits(50, 50), {}), (Limits(50, 60), {"startingOffsets": "earliest"})],
)
async def test_a_queue_recreated_after_all_its_messages_expired_is_noticed(
    ends: Limits, options: dict[str, str], *, is_restarted: bool
) -> None:
    cluster = MadeUp({Q0: ends, Q1: Limits(0, 5)})
    first = following(cluster, **options)
    start = await latest(first, {})
    marks = first.marks
    assert (start[Q0], marks[Q0]) == (50, NOTHING_BELOW)
    if not is_restarted:
        # The first look compares everything, a later one what has changed.
        await first.latest(start, marks=marks)
    cluster.life = dict.fromkeys(cluster.life, 1)
    cluster.ends[Q0] = Limits(0, 80)
    strict = following(cluster) if is_restarted else first
    with pytest.raises(DataLost, match="t@a:0 was re-created: the message at offset 49 is not"):
        await strict.latest(start, has_begun=True, marks=marks)
    loose = following(cluster, failOnDataLoss="false")
    back = await loose.latest(start, has_begun=True, marks=marks)
    assert back[Q0] == 0
    assert (await latest(loose, back))[Q0] == 80


@virtual_time()
async def test_an_expired_queue_that_fills_again_is_read_without_extra_requests() -> None:
    cluster = MadeUp({Q0: Limits(50, 50)})
    planner = following(cluster)
    start = await latest(planner, {})
    for _ in range(3):
        assert await latest(planner, start) == start
    cluster.marked.clear()
    cluster.ends[Q0] = Limits(50, 60)
    assert await latest(planner, start) == {Q0: 60}
    assert cluster.marked == [{Q0: 60}], "there is nothing to compare below 50"
    assert planner.marks == {Q0: (0, 59)}


@virtual_time()
async def test_messages_missing_on_a_slave_prove_nothing() -> None:
    cluster = MadeUp({Q0: Limits(50, 50, is_certain=False)})
    planner = following(cluster, startingOffsets="earliest", discoveryInterval="1s", idleWait="1s")
    start = await latest(planner, {})
    assert (start, planner.marks) == ({Q0: 50}, {})
    cluster.ends[Q0] = Limits(50, 50)
    for _ in range(2):
        assert await latest(planner, start) == start
    assert planner.marks == {Q0: NOTHING_BELOW}, "the master does not have it either"
    cluster.ends[Q0] = Limits(30, 55, is_certain=False)
    assert await latest(planner, start) == {Q0: 55}, "a slave may keep messages longer"


@virtual_time()
async def test_an_old_checkpoint_gets_its_marks_without_new_messages() -> None:
    cluster = MadeUp({Q0: Limits(0, 10), Q1: Limits(5, 5), Q2: Limits(0, 0)})
    start = {Q0: 10, Q1: 5, Q2: 0}
    planner = following(cluster, discoveryInterval="1m")
    assert await planner.latest(start, has_begun=True, marks={}) == start
    marks = planner.marks
    assert marks == {Q0: (0, 9), Q1: NOTHING_BELOW}
    assert cluster.marked == [{Q0: 10, Q1: 5}]
    assert await planner.latest(start, marks=marks) == start
    assert planner.marks == marks, "the checkpoint stays the same"
    cluster.life, cluster.ends[Q0] = dict.fromkeys(cluster.life, 1), Limits(0, 25)
    with pytest.raises(DataLost, match="t@a:0 was re-created"):
        await planner.latest(start, marks=marks)


@virtual_time()
async def test_a_mark_never_outlives_its_offset() -> None:
    class Partial(MadeUp):
        async def marks(self, offsets: Offsets) -> dict[MessageQueue, Mark | None]:
            found = await super().marks(offsets)
            return found | ({Q0: None} if offsets.get(Q0) == 12 else {})

    cluster = Partial({Q0: Limits(0, 12), Q1: Limits(0, 5)})
    planner = following(cluster)
    end = await planner.latest({Q0: 10, Q1: 5}, has_begun=True, marks={Q0: (0, 9)})
    assert end == {Q0: 12, Q1: 5}
    assert planner.marks == {Q1: (0, 4)}, "the broker cannot read the last message"


@virtual_time()
async def test_a_queue_recreated_while_a_batch_is_planned_does_not_lose_its_mark() -> None:
    class Recreated(MadeUp):
        async def marks(self, offsets: Offsets) -> dict[MessageQueue, Mark | None]:
            if offsets.get(Q0) != 12:
                return await super().marks(offsets)
            self.life, self.ends = {Q0: 1}, {Q0: Limits(0, 3)}
            return {Q0: None}

    cluster = Recreated({Q0: Limits(0, 10)})
    planner = following(cluster)
    start = await latest(planner, {})
    cluster.ends[Q0] = Limits(0, 12)
    assert await latest(planner, start) == start
    assert planner.marks == {Q0: (0, 9)}
    cluster.ends[Q0] = Limits(0, 25)
    with pytest.raises(DataLost, match="t@a:0 was re-created"):
        await latest(planner, start)
