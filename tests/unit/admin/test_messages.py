"""Sending, finding and watching messages; dead letters and how they are redriven."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from administered import administered, bodies, now
from clusters import Cluster
from consumers import Seen, always, consuming, send
from turbopump.admin import (
    REDRIVEN_FROM,
    Destination,
    Earliest,
    Last,
    LetterFilter,
    Outcome,
    Redriven,
    dead_letters,
)
from turbopump.broker.config import LimitsConfig
from turbopump.client.delivery.results import ConsumeResult
from turbopump.errors import ConnectFailed, ConnectionLost, InvalidArgument, NotThere, RemoteError
from turbopump.machine.files import read_file
from turbopump.message import Message, MessageQueue
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.bodies import DirectConsumption
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command

# --- sending and finding --------------------------------------------------------------------------


@virtual_time()
async def test_message_is_sent_and_found_in_every_way(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, admin):
        await admin.topics.create("T", queues=2)
        queue = MessageQueue("T", "b", 1)
        message = Message("T", b"x", tags="t", keys=["k"], properties={"p": "v"})
        receipt = await admin.messages.send(message, queue=queue)
        assert receipt.queue == queue
        found = [
            *await admin.messages.find(receipt.message_id, "T"),
            *await admin.messages.find(receipt.offset_id),
            *await admin.messages.by_unique_key("T", receipt.message_id),
            *await admin.messages.by_key("T", "k"),
            await admin.messages.at(queue, receipt.queue_offset),
        ]
        assert len(found) == 5
        for each in found:
            assert (each.body, each.tags, each.properties["p"]) == (b"x", "t", "v")
            assert each.message_id == receipt.message_id


@virtual_time()
async def test_damaged_messages_are_not_found_by_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        await admin.messages.send(Message("T", b"whole", keys=["k"]))
        receipt = await admin.messages.send(Message("T", b"harmed", keys=["k"]))
        damage(world, b"harmed")
        assert [each.body for each in await admin.messages.by_key("T", "k")] == [b"whole"]
        assert await admin.messages.by_unique_key("T", receipt.message_id) == ()
    assert "T, queue 0, offset 1: body does not match its checksum" in caplog.text


def damage(world: Cluster, body: bytes) -> None:
    """Flip a bit of a body in the log."""
    disk, log = world.disk(), world.broker().config.directory / "commitlog" / ("0" * 20)
    disk.flip_bit(log, read_file(disk, log).index(body))


@virtual_time()
async def test_messages_that_do_not_exist(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (_, admin):
        await admin.topics.create("T", queues=1)
        receipt = await admin.messages.send(Message("T", b"x", keys=["k"]))
        with pytest.raises(NotThere, match="no message of topic 'T' with id 'nonsense'"):
            await admin.messages.find("nonsense", "T")
        (found,) = await admin.messages.find(receipt.message_id)
        assert found.body == b"x", "found without its topic"
        with pytest.raises(NotThere, match="no message"):
            await admin.messages.find("nonsense")
        last = receipt.offset_id[:-1] + "1"
        with pytest.raises(NotThere, match="no message"):
            await admin.messages.find(last)
        assert await admin.messages.by_key("T", "other") == ()
        assert await admin.messages.by_key("T", "k", end=datetime.fromtimestamp(0, UTC)) == ()
        with pytest.raises(NotThere, match=r"T@a:0 at offset 7 \(0 to 1\)"):
            await admin.messages.at(MessageQueue("T", "a", 0), 7)
        with pytest.raises(NotThere, match="no queue 'T@a:9'"):
            await admin.messages.at(MessageQueue("T", "a", 9), 0)
        with pytest.raises(InvalidArgument, match="offset must be 0 or more, got -1"):
            await admin.messages.at(MessageQueue("T", "a", 0), -1)


@virtual_time()
async def test_sending_creates_no_topic_by_accident(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (_, admin):
        with pytest.raises(NotThere, match="no topic 'U'"):
            await admin.messages.send(Message("U", b"x"))
        await admin.messages.send(Message("U", b"x"), create_topic=True)
        queue = MessageQueue("U", "a", 0)
        with pytest.raises(InvalidArgument, match="queue or sharding_key, not both"):
            await admin.messages.send(Message("U", b"x"), queue=queue, sharding_key="k")
        receipts = [
            await admin.messages.send(Message("U", b"x"), sharding_key="customer-1")
            for _ in range(3)
        ]
        assert len({receipt.queue for receipt in receipts}) == 1


@virtual_time()
async def test_times_of_a_key_are_exact_to_the_millisecond(tmp_path: Path) -> None:
    """Indexes store only seconds."""
    async with administered(tmp_path, "a") as (_, admin):
        await admin.topics.create("T", queues=1)
        moments = []
        for number in range(4):
            await asyncio.sleep(0.3)
            moments.append(now())
            await admin.messages.send(Message("T", b"%d" % number, keys=["k"]))
        found = await admin.messages.by_key("T", "k", begin=moments[1], end=moments[3])
        assert [each.body for each in found] == [b"1", b"2"]
        stored = [
            datetime.fromtimestamp(each.store_timestamp_ms / 1000, UTC)
            for each in await admin.messages.by_key("T", "k")
        ]
        found = await admin.messages.by_key("T", "k", begin=stored[1], end=stored[2])
        assert [each.body for each in found] == [b"1"]
        by_id = partial(admin.messages.by_unique_key, "T", found[0].message_id)
        assert [each.body for each in await by_id(begin=stored[1], end=stored[2])] == [b"1"]
        assert await by_id(begin=stored[2]) == await by_id(end=stored[1]) == ()


@virtual_time()
async def test_of_many_with_a_key_the_newest_of_all_brokers_are_found(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, admin):
        await admin.topics.create("T", queues=1)
        for number in range(6):
            await asyncio.sleep(0.3)
            to = MessageQueue("T", "ab"[number % 2], 0)
            await admin.messages.send(Message("T", b"%d" % number, keys=["k"]), queue=to)
        found = await admin.messages.by_key("T", "k", count_max=2)
        assert [each.body for each in found] == [b"4", b"5"]


@virtual_time()
async def test_messages_of_a_time_range_are_returned_in_order(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=2)
        moments = []
        for number in range(5):
            moments.append(now())
            await send(world, [b"%d" % number], tags="odd" if number % 2 else "even")
            await asyncio.sleep(10)
        span = await admin.messages.span("T", moments[1], moments[4])
        assert span.messages == 3
        assert await bodies(admin.messages.read(span)) == [b"1", b"2", b"3"]
        assert await bodies(admin.messages.read(span, tags="odd")) == [b"1", b"3"]
        assert (await admin.messages.span("T", moments[3])).messages == 2
        with pytest.raises(InvalidArgument, match="end must not be before begin"):
            await admin.messages.span("T", moments[1], moments[0])


@virtual_time()
async def test_member_consumes_a_message_on_request(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=1)
        receipt = await admin.messages.send(Message("T", b"1"))
        seen = Seen()
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 1, 60)
            (message,) = await admin.messages.find(receipt.offset_id)
            done = await admin.messages.consume(message, "g", "10.0.1.1@test")
            assert (done.result, done.is_success, seen.bodies) == ("CR_SUCCESS", True, [b"1", b"1"])
            seen.decide = always(ConsumeResult.RETRY_LATER)
            done = await admin.messages.consume(message, "g", "10.0.1.1@test")
            assert (done.result, done.is_success) == ("CR_LATER", False)
            with pytest.raises(RemoteError, match="not online"):
                await admin.messages.consume(message, "g", "nobody")


@virtual_time()
async def test_result_of_a_client_that_answers_with_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(_self: DirectConsumption, **_: object) -> bytes:
        return b'{"order":false,"autoCommit":true,"consumeResult":1,"remark":"","spentTimeMills":3}'

    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=1)
        receipt = await admin.messages.send(Message("T", b"1"))
        seen = Seen()
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 1, 60)
            (message,) = await admin.messages.find(receipt.offset_id)
            monkeypatch.setattr(DirectConsumption, "encode", encode)
            done = await admin.messages.consume(message, "g", "10.0.1.1@test")
            assert (done.result, done.is_success) == ("CR_LATER", False)


# --- dead letters ---------------------------------------------------------------------------------


async def make_letters(world: Cluster, count: int, group: str = "g") -> None:
    """Let a group dead-letter messages of topic T."""
    failing = Seen(always(ConsumeResult.RETRY_LATER))
    async with consuming(world, failing, group=group, max_attempts=0):
        await wait_until(lambda: failing.count >= count, 60)
        await asyncio.sleep(1)


async def redriven(work: AsyncIterator[Redriven]) -> list[tuple[bytes, Outcome, str | None]]:
    found = [(done.letter.message.body, done.outcome, done.topic) async for done in work]
    return sorted(found, key=lambda each: each[0])


@virtual_time()
async def test_letters_are_listed_and_shown(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=1)
        assert [letter async for letter in admin.dead_letters.list("g")] == []
        for body, tags in ((b"1", "x"), (b"2", "y")):
            await admin.messages.send(Message("T", body, tags=tags, keys=[f"k-{tags}"]))
        await make_letters(world, 2)
        letters = [letter async for letter in admin.dead_letters.list("g")]
        assert sorted(letter.message.body for letter in letters) == [b"1", b"2"]
        assert {letter.origin_topic for letter in letters} == {"T"}
        assert {letter.attempts for letter in letters} == {1}
        for wanted in (LetterFilter(tags="y"), LetterFilter(key="k-y")):
            (one,) = [letter async for letter in admin.dead_letters.list("g", wanted=wanted)]
            assert one.message.body == b"2"
        other = LetterFilter(origin_topic="U")
        assert [letter async for letter in admin.dead_letters.list("g", wanted=other)] == []
        first = letters[0]
        for name in (first.letter_id, first.message.message_id):
            shown = await admin.dead_letters.show("g", name)
            assert shown.letter_id == first.letter_id
            assert shown.queue == first.queue
        with pytest.raises(NotThere, match="dead letter of group 'g' with id 'nope'"):
            await admin.dead_letters.show("g", "nope")


@virtual_time()
async def test_letters_go_back_once(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=1)
        for body, tags in ((b"1", "x"), (b"2", "y"), (b"3" * 5000, "x")):
            await admin.messages.send(Message("T", body, tags=tags, properties={"p": "v"}))
        await make_letters(world, 3)
        letters = admin.dead_letters
        dry = await redriven(letters.redrive("g", dry_run=True))
        assert [outcome for _, outcome, _ in dry] == [Outcome.WOULD_BE_SENT] * 3
        some = await redriven(letters.redrive("g", wanted=LetterFilter(tags="y")))
        assert some == [(b"2", Outcome.SENT, "T")]
        seen: list[None] = []
        rest = await redriven(letters.redrive("g", on_read=lambda: seen.append(None)))
        assert [outcome for _, outcome, _ in rest] == [
            Outcome.SENT,
            Outcome.SENT_BEFORE,
            Outcome.SENT,
        ]
        assert len(seen) == 3
        again = await redriven(letters.redrive("g", to=Destination.RETRY))
        assert [outcome for _, outcome, _ in again] == [Outcome.SENT_BEFORE] * 3
        assert (await admin.topics.status("T")).messages == 6
        tail = admin.messages.tail("T", start=Last(3), follow=False)
        copies = {message.body: message async for message in tail}
        assert set(copies) == {b"1", b"2", b"3" * 5000}
        for copy in copies.values():
            assert copy.properties["p"] == "v"
            assert copy.reconsume_times == 0
            assert REDRIVEN_FROM in copy.properties
            originals = await admin.messages.by_unique_key("T", copy.message_id)
            assert len(originals) == 2
        forced = await redriven(letters.redrive("g", again=True))
        assert [outcome for _, outcome, _ in forced] == [Outcome.SENT] * 3


@virtual_time()
async def test_letter_of_a_redriven_message_can_go_back_too(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        await admin.messages.send(Message("T", b"1"))
        await make_letters(world, 1)
        for _ in range(2):
            await redriven(admin.dead_letters.redrive("g"))
        await make_letters(world, 1)
        found = await redriven(admin.dead_letters.redrive("g"))
        assert sorted(outcome.value for _, outcome, _ in found) == ["sent", "sent before"]


@virtual_time()
async def test_letters_to_the_retry_topic_reach_only_their_group(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        await admin.messages.send(Message("T", b"1", tags="x"))
        await make_letters(world, 1)
        other, own = Seen(), Seen()
        async with consuming(world, other, "10.0.1.5", group="other"):
            await wait_until(lambda: other.count == 1, 60)
            to = Destination.RETRY
            done = await redriven(admin.dead_letters.redrive("g", to=to))
            assert done == [(b"1", Outcome.SENT, "%RETRY%g")]
            async with consuming(world, own, "10.0.1.6"):
                await wait_until(lambda: own.count == 1, 60)
            assert (own.messages[0].topic, own.bodies) == ("T", [b"1"])
            assert other.count == 1
            assert (await redriven(admin.dead_letters.redrive("g")))[0][1] is Outcome.SENT_BEFORE


@virtual_time()
async def test_letters_to_a_topic_of_choice(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        await admin.messages.send(Message("T", b"1"))
        await make_letters(world, 1)
        with pytest.raises(NotThere, match="no topic 'U'"):
            await redriven(admin.dead_letters.redrive("g", to="U"))
        await admin.topics.create("U", queues=1)
        for outcome in (Outcome.SENT, Outcome.SENT_BEFORE):
            assert (await redriven(admin.dead_letters.redrive("g", to="U")))[0][1:] == (
                outcome,
                "U",
            )


@virtual_time()
async def test_letters_cannot_go_to_dead_letters(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (_, admin):
        await admin.topics.create("%DLQ%g", queues=1)
        with pytest.raises(InvalidArgument, match=r"%DLQ%g.*holds dead letters"):
            await redriven(admin.dead_letters.redrive("g", to="%DLQ%g"))


@virtual_time()
async def test_letters_are_redriven_to_the_retry_topic_once_however_often_they_fail(
    tmp_path: Path,
) -> None:
    """All attempts have the same message id, and brokers find only the newest of many."""
    limits = LimitsConfig(query_count_max=2)
    async with administered(tmp_path, "a", limits=limits) as (world, admin):
        await admin.topics.create("T", queues=1)
        await admin.messages.send(Message("T", b"1", keys=["mine"]))
        failing = Seen(always(ConsumeResult.RETRY_LATER))
        async with consuming(world, failing, max_attempts=1):
            for letters in range(1, 4):
                await wait_until(partial(has_letters, world, letters), 3600)
                found = await redriven(admin.dead_letters.redrive("g", to=Destination.RETRY))
                outcomes = [outcome for _, outcome, _ in found]
                assert outcomes == [Outcome.SENT_BEFORE] * (letters - 1) + [Outcome.SENT]
        last = [letter async for letter in admin.dead_letters.list("g")][-1].message
        # Its own key, and that of the letter that it was a copy of; no others accumulate.
        assert last.keys == ["mine", last.properties[REDRIVEN_FROM]]


def has_letters(world: Cluster, count: int, group: str = "g") -> bool:
    return len(world.dead_letters(group)) == count


@virtual_time()
async def test_redrive_does_not_recreate_a_deleted_topic(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        await admin.messages.send(Message("T", b"1"))
        await make_letters(world, 1)
        await admin.topics.delete("T")
        for dry_run in (True, False):
            found = await redriven(admin.dead_letters.redrive("g", dry_run=dry_run))
            assert found == [(b"1", Outcome.ORIGIN_GONE, "T")]
        assert "T" not in await admin.topics.names()
        found = await redriven(admin.dead_letters.redrive("g", create_topic=True))
        assert found == [(b"1", Outcome.SENT, "T")]
        assert (await admin.topics.status("T")).messages == 1


@virtual_time()
async def test_every_examined_letter_is_reported_even_if_not_selected(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        for number in range(3):
            await admin.messages.send(Message("T", b"%d" % number, keys=[f"k{number}"]))
        await make_letters(world, 3)
        seen: list[None] = []
        wanted = LetterFilter(key="k1")
        letters = admin.dead_letters
        work = letters.redrive("g", wanted=wanted, on_read=lambda: seen.append(None))
        assert len(await redriven(work)) == 1
        assert len(seen) == 3


@virtual_time()
async def test_only_a_few_large_letters_are_processed_concurrently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "_BYTES_AT_ONCE", 10_000)
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        for _ in range(4):
            await admin.messages.send(Message("T", random.Random(1).randbytes(6000)))
        await make_letters(world, 4)
        seen: list[None] = []
        work = admin.dead_letters.redrive("g", on_read=lambda: seen.append(None))
        read_by_then = [len(seen) async for _ in work]
        assert read_by_then == [2, 2, 4, 4]


@virtual_time()
async def test_a_letter_without_an_origin_is_skipped(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (_, admin):
        await admin.topics.create("%DLQ%g", queues=1)
        await admin.messages.send(Message("%DLQ%g", b"by hand"))
        done = await redriven(admin.dead_letters.redrive("g"))
        assert done == [(b"by hand", Outcome.ORIGIN_UNKNOWN, None)]


class FailingSends:
    """A hook that fails sends: before they are sent, or after they have arrived."""

    def __init__(self) -> None:
        self.refusals: list[Exception] = []
        self.lost_answers = 0

    def before_request(self, address: str, command: Command) -> Command:
        if command.code == RequestCode.SEND_MESSAGE_V2 and self.refusals:
            raise self.refusals.pop(0)
        return command

    def after_response(self, address: str, request: Command, response: Command) -> None:
        if request.code == RequestCode.SEND_MESSAGE_V2 and self.lost_answers:
            self.lost_answers -= 1
            raise ConnectionLost("the answer never came")


@virtual_time()
async def test_an_interrupted_redrive_can_be_repeated_without_duplicates(tmp_path: Path) -> None:
    failing = FailingSends()
    async with administered(tmp_path, "a", [failing]) as (world, admin):
        await admin.topics.create("T", queues=1)
        for number in range(4):
            await admin.messages.send(Message("T", b"%d" % number))
        await make_letters(world, 4)
        failing.refusals = [ConnectionLost("it never left")]
        with pytest.raises(ConnectionLost, match="never left"):
            await redriven(admin.dead_letters.redrive("g"))
        failing.lost_answers = 1
        with pytest.raises(ConnectionLost, match="never came"):
            await redriven(admin.dead_letters.redrive("g"))
        await redriven(admin.dead_letters.redrive("g"))
        found = await redriven(admin.dead_letters.redrive("g"))
        assert [outcome for _, outcome, _ in found] == [Outcome.SENT_BEFORE] * 4
        tail = admin.messages.tail("T", start=Earliest(), follow=False)
        assert sorted(await bodies(tail)) == [b"%d" % (number // 2) for number in range(8)]


@virtual_time()
async def test_busy_or_restarting_broker_is_waited_for_when_redriving(tmp_path: Path) -> None:
    failing = FailingSends()
    async with administered(tmp_path, "a", [failing]) as (world, admin):
        await admin.topics.create("T", queues=1)
        await admin.messages.send(Message("T", b"1"))
        await make_letters(world, 1)
        busy = RemoteError(ResponseCode.SYSTEM_BUSY, "busy")
        failing.refusals = [busy, ConnectFailed("restarting"), busy]
        found = await redriven(admin.dead_letters.redrive("g"))
        assert found == [(b"1", Outcome.SENT, "T")]
        assert not failing.refusals
        failing.refusals = [RemoteError(ResponseCode.NO_PERMISSION, "no")]
        with pytest.raises(RemoteError, match="no"):
            await redriven(admin.dead_letters.redrive("g", again=True))
