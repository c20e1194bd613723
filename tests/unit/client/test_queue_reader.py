"""What a reader of queues compares when it reconnects to a replica."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from turbopump.client import calls
from turbopump.client.calls import NothingMatched, NothingNew
from turbopump.client.continuity import LastPulled, Source, StoredMessage
from turbopump.client.pull_config import PullTimes
from turbopump.client.queue_reader import QueueReader
from turbopump.client.replicas import Replica
from turbopump.client.subscriptions import subscription
from turbopump.errors import NoRoute
from turbopump.filters.tags import EVERYTHING
from turbopump.message import MessageQueue, QueueOffset
from turbopump.testing import virtual_time
from turbopump.wire.headers import PullMessage

QUEUE = MessageQueue("T", "broker-a", 0)
BEFORE, NOW = Source("10.0.0.2:10911", 1), Source("10.0.0.2:10911", 2)
NEWEST = StoredMessage(QueueOffset(3), 300, 1, 1)


@pytest.mark.parametrize("end", [3, 0])
@virtual_time()
async def test_a_slave_that_lags_counts_as_not_compared(end: int) -> None:
    """It may be a master that lost messages, found by an old route: their offsets are reused."""
    config = SimpleNamespace(namespace="", request_timeout_ms=3000)
    session = SimpleNamespace(source=lambda _: NOW, config=config)
    reader = QueueReader(cast("Any", session), "g", PullTimes())
    reader._answered[QUEUE] = Replica(1, NOW.address)
    last = LastPulled(BEFORE, NEWEST, QueueOffset(4), QueueOffset(4))
    outcome = NothingNew(QueueOffset(4), QueueOffset(0), QueueOffset(end), 0)
    wanted = subscription("T", EVERYTHING, 0)
    kept, same = await reader.continued(QUEUE, wanted, last, QueueOffset(4), outcome)
    assert kept == last, "the next pull over this connection has to be compared"
    assert same is outcome


@pytest.mark.parametrize("message", [NEWEST, None], ids=["a message", "those filtered out"])
@pytest.mark.parametrize(
    ("start", "has_gap", "is_refused"),
    [(0, False, True), (0, True, False), (4, False, False)],
    ids=["removed", "damaged", "expired"],
)
def test_a_slave_that_has_removed_messages_is_not_read_behind_them(
    monkeypatch: pytest.MonkeyPatch,
    message: StoredMessage | None,
    start: int,
    *,
    has_gap: bool,
    is_refused: bool,
) -> None:
    """Others may be in their places. Damage in its copy does not mean that."""

    async def refuse(_: object, __: str, header: PullMessage, ___: int) -> NothingMatched:
        limits = QueueOffset(start), QueueOffset(9)
        return NothingMatched(QueueOffset(header.queue_offset), *limits, 0, has_gap=has_gap)

    async def first(*_: object) -> QueueOffset:
        return QueueOffset(0)

    @virtual_time()
    async def run() -> None:
        config = SimpleNamespace(namespace="", request_timeout_ms=3000)
        session = SimpleNamespace(source=lambda _: NOW, config=config, keep_to_master=id)
        reader = QueueReader(cast("Any", session), "g", PullTimes())
        reader._answered[QUEUE] = Replica(1, NOW.address)
        since = QueueOffset(4 if message else 2)
        last = LastPulled(BEFORE, message, since, QueueOffset(4))
        outcome = NothingNew(QueueOffset(4), QueueOffset(start), QueueOffset(9), 0)
        wanted = subscription("T", EVERYTHING, 0)
        with pytest.raises(NoRoute, match="other messages") if is_refused else nullcontext():
            assert await reader.continued(QUEUE, wanted, last, QueueOffset(4), outcome) == (
                last._replace(source=NOW),
                outcome,
            )

    monkeypatch.setattr(calls, "pull_records", refuse)
    monkeypatch.setattr(calls, "offset_at", first)
    run()


@virtual_time()
async def test_a_position_is_committed_to_the_master_that_was_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The route may name another master meanwhile, which may have other messages."""
    masters = iter([Replica(0, BEFORE.address), Replica(0, "10.0.0.9:10911")])

    async def next_master(_: MessageQueue) -> Replica:
        return next(masters)

    async def commit(_: object, address: str, *rest: object, is_oneway: bool) -> None:
        commits.append((address, rest[2]))

    commits: list[tuple[str, object]] = []
    monkeypatch.setattr(calls, "commit_offset", commit)
    config = SimpleNamespace(namespace="", request_timeout_ms=3000)
    session = SimpleNamespace(source=lambda _: BEFORE, config=config, replica_to_commit=next_master)
    reader = QueueReader(cast("Any", session), "g", PullTimes())
    reader._compared[QUEUE] = BEFORE
    last = LastPulled(BEFORE, None, QueueOffset(4), QueueOffset(4))
    wanted = subscription("T", EVERYTHING, 0)
    await reader.commit_pulled(QUEUE, wanted, last, QueueOffset(4))
    assert commits == [(BEFORE.address, QueueOffset(4))]
