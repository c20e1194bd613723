"""Store directories written by Apache RocketMQ: everything in them is found, with equal answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from store_work import log_of, queues_of
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store import (
    Found,
    MessagesRemoved,
    NoMatch,
    OffsetTooLarge,
    OffsetTooSmall,
    QueueEmpty,
    QueueUnknown,
    Store,
    UnitsMissing,
    UpToDate,
)
from turbopump.store.commit_log import CommitLog
from turbopump.store.consume_queue import ConsumeQueue
from turbopump.store.time_lookup import nearest_between, result_of
from turbopump.wire.record import decode_record
from unit.store.support import GOLDEN_CONFIG, golden, tag_filter, unpack

ARCHIVES = ("store", "store_crash", "store_trimmed", "store_v6")
STATUS = {
    Found: "FOUND",
    NoMatch: "NO_MATCHED_MESSAGE",
    MessagesRemoved: "MESSAGE_WAS_REMOVING",
    QueueUnknown: "NO_MATCHED_LOGIC_QUEUE",
    QueueEmpty: "NO_MESSAGE_IN_QUEUE",
    OffsetTooSmall: "OFFSET_TOO_SMALL",
    UpToDate: "OFFSET_OVERFLOW_ONE",
    OffsetTooLarge: "OFFSET_OVERFLOW_BADLY",
    UnitsMissing: "OFFSET_FOUND_NULL",
}


@pytest.fixture(params=ARCHIVES)
def archive(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(archive: str, tmp_path: Path) -> Any:
    with Store.open(unpack(archive, tmp_path), GOLDEN_CONFIG) as store:
        yield store


def test_every_message_is_found_by_its_position(opened: Store, archive: str) -> None:
    listing = golden(archive)
    assert opened.written_end == listing["endOffset"]
    for expected in listing["messages"]:
        data = opened.message_at(PhysicalOffset(expected["physicalOffset"]))
        assert data is not None
        view = decode_record(data, check_crc=True)
        assert (view.topic, view.queue_id, view.queue_offset, view.offset_id) == (
            expected["topic"],
            expected["queueId"],
            expected["queueOffset"],
            expected["msgId"],
        )
        assert view.stored_body.hex() == expected["body"]
        assert view.properties == expected["properties"]


def test_queues_have_the_same_units(opened: Store, archive: str) -> None:
    for topic, queues in golden(f"{archive}_reads")["queues"].items():
        for queue_id, expected in queues.items():
            low, high = opened.queue_range(topic, int(queue_id))
            assert (low, high) == (expected["min"], expected["max"]), (topic, queue_id)
            units = []
            for offset in range(low, high):
                outcome = opened.read(topic, int(queue_id), QueueOffset(offset), 1)
                assert isinstance(outcome, Found)
                view = decode_record(outcome.messages[0])
                units.append([view.physical_offset, view.size])
            assert units == [unit[:2] for unit in expected["units"]]
            if units:
                earliest = opened.store_timestamp_ms(topic, int(queue_id), low)
                assert earliest == expected["earliestStoreTime"]


def test_reads_have_the_same_outcome(opened: Store, archive: str) -> None:
    for asked in golden(f"{archive}_reads")["getMessage"]:
        outcome = opened.read(
            asked["topic"],
            asked["queueId"],
            QueueOffset(asked["offset"]),
            asked["maxMsgNums"],
            tag_filter(asked["subscription"]),
        )
        found = outcome.messages if isinstance(outcome, Found) else []
        assert (
            STATUS[type(outcome)],
            outcome.next_offset,
            outcome.min_offset,
            outcome.max_offset,
            [decode_record(message).physical_offset for message in found],
        ) == (
            asked["status"],
            asked["nextBeginOffset"],
            asked["minOffset"],
            asked["maxOffset"],
            asked["physicalOffsets"],
        ), asked


def test_search_by_time_has_the_same_result(opened: Store, archive: str) -> None:
    for queue in golden(f"{archive}_reads")["offsetByTime"]:
        topic, queue_id = queue["topic"], queue["queueId"]
        for timestamp_ms, expected in queue["asked"]:
            found = opened.offset_by_time(topic, queue_id, timestamp_ms)
            if len(queue["files"]) == 1:
                assert found == expected, (topic, queue_id, timestamp_ms)
            else:
                chosen = file_as_the_original_chooses(opened, queue, timestamp_ms)
                there = result_of(nearest_between(*chosen, timestamp_ms))
                assert there == expected, (topic, queue_id, timestamp_ms)
                # Apache RocketMQ may choose a file that misses the message; ours never does.
                ours, theirs = (
                    abs(timestamp_ms - (opened.store_timestamp_ms(topic, queue_id, at) or 0))
                    for at in (found, QueueOffset(expected))
                )
                assert ours <= theirs


def file_as_the_original_chooses(
    store: Store, queue: Any, timestamp_ms: int
) -> tuple[CommitLog, ConsumeQueue, QueueOffset, QueueOffset]:
    files = queue["files"]
    changed = [number for number, (_, modified) in enumerate(files) if modified >= timestamp_ms]
    found = queues_of(store).find(queue["topic"], queue["queueId"])
    assert found is not None
    low, high = found.file_ranges()[changed[0] if changed else -1]
    return log_of(store), found, low, high


def test_search_by_key_has_the_same_result(opened: Store, archive: str) -> None:
    for asked in golden(f"{archive}_reads")["queryMessage"]:
        found = opened.messages_by_key(
            asked["topic"], asked["key"], asked["maxNum"], asked["begin"], asked["end"]
        )
        positions = [decode_record(message).physical_offset for message in found]
        # Apache RocketMQ's recovery may index a message twice, and then returns it twice.
        assert positions == sorted(set(asked["physicalOffsets"])), asked
