"""What a reader of queues compares when it reconnects to a replica."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from turbopump.client import calls
from turbopump.client.calls import NothingNew
from turbopump.client.continuity import LastPulled, Source, StoredMessage
from turbopump.client.pull_config import PullTimes
from turbopump.client.queue_reader import QueueReader
from turbopump.client.replicas import Replica
from turbopump.client.subscriptions import subscription
from turbopump.filters.tags import EVERYTHING
from turbopump.message import MessageQueue, QueueOffset
from turbopump.testing import virtual_time

QUEUE = MessageQueue("T", "broker-a", 0)
BEFORE, NOW = Source("10.0.0.2:10911", 1), Source("10.0.0.2:10911", 2)


@pytest.mark.parametrize("end", [3, 0])
@virtual_time()
async def test_a_slave_that_lags_counts_as_not_compared(end: int) -> None:
    """It may be a master that lost messages, found by an old route: their offsets are reused."""
    config = SimpleNamespace(namespace="", request_timeout_ms=3000)
    session = SimpleNamespace(source=lambda _: NOW, config=config)
    reader = QueueReader(cast("Any", session), "g", PullTimes())
    reader._answered[QUEUE] = Replica(1, NOW.address)
    newest = StoredMessage(QueueOffset(3), 300, 1, 1)
    last = LastPulled(BEFORE, newest, QueueOffset(4), QueueOffset(4))
    outcome = NothingNew(QueueOffset(4), QueueOffset(0), QueueOffset(end), 0)
    wanted = subscription("T", EVERYTHING, 0)
    kept, same = await reader.continued(QUEUE, wanted, last, QueueOffset(4), outcome)
    assert kept == last, "the next pull over this connection has to be compared"
    assert same is outcome


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
