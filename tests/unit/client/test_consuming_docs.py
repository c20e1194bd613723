"""What the consuming guide says of files and waits is what the client does."""

from __future__ import annotations

from pathlib import Path

from turbopump.client.offsets import offsets_path
from turbopump.client.owned_queue import LOCK_TRUST_MS
from turbopump.client.queue_locks import RENEW_INTERVAL_MS, UNLOCK_LATER_MS
from turbopump.client.rebalance import INTERVAL_MS, PULL_IDLE_MS_MAX
from turbopump.message import MessageQueue
from turbopump.wire.bodies import QueueOffsets

GUIDE = " ".join((Path(__file__).parents[3] / "docs/guide/consuming.md").read_text().split())


def test_the_file_of_a_broadcasting_consumer() -> None:
    path = offsets_path(None, "192.0.2.7@DEFAULT", "prices")
    assert f"~/{path.relative_to(Path.home())}" in GUIDE
    offsets: dict[MessageQueue, int] = {MessageQueue("orders", "broker-a", 0): 42}
    assert QueueOffsets(offset_table=offsets).encode(bare_keys=True).decode() in GUIDE


def test_the_waits_while_a_queue_moves() -> None:
    seconds = {
        "no pull has started for {} s is released": PULL_IDLE_MS_MAX,
        "its next rebalance, {} s later": INTERVAL_MS,
        "otherwise {} s later, since a listener may still have": UNLOCK_LATER_MS,
        "Renewals are every {} s": RENEW_INTERVAL_MS,
        "the lock is trusted until its {} s are over": LOCK_TRUST_MS,
    }
    assert [said for said, ms in seconds.items() if said.format(ms // 1000) not in GUIDE] == []
