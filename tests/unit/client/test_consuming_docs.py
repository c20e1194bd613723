"""What the consuming guide says of files and waits is what the client does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from turbopump import Listening
from turbopump.client.consumption import _EXPIRY_CHECK_MS
from turbopump.client.delivery.concurrent import _EXPIRED_DELAY_LEVEL
from turbopump.client.delivery.workers import _GROW_AFTER_S
from turbopump.client.offsets import offsets_path
from turbopump.client.owned_queue import LOCK_TRUST_MS
from turbopump.client.push_config import CONCURRENCY
from turbopump.client.queue_locks import RENEW_INTERVAL_MS, UNLOCK_LATER_MS
from turbopump.client.rebalance import INTERVAL_MS, PULL_IDLE_MS_MAX
from turbopump.message import MessageQueue
from turbopump.wire.bodies import QueueOffsets
from turbopump.wire.delay_levels import DELAY_LEVELS, parse_delay_levels

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = " ".join((DOCS / "guide/consuming.md").read_text().split())


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


def headings(page: Path) -> set[str]:
    """Return what links name the headings of a page by."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in found}


@pytest.mark.parametrize("name", ["consuming", "troubleshooting"])
def test_questions_lead_to_answers(name: str) -> None:
    page = DOCS / "guide" / f"{name}.md"
    text = page.read_text()
    found = [
        ((page.parent / path).resolve() if path else page, anchor)
        for path, anchor in re.findall(r"\]\(([^)#:]*\.md|)#([\w-]+)\)", text)
    ]
    assert len(found) > 10
    assert [link for link in found if link[1] not in headings(link[0])] == []


def test_a_listener_that_takes_too_long() -> None:
    minutes = Listening().timeout_ms // 60_000
    every = f"After {minutes} minutes (`Listening.timeout`, checked every minute)"
    assert _EXPIRY_CHECK_MS == 60_000
    assert every in GUIDE
    delay_s = parse_delay_levels(DELAY_LEVELS)[_EXPIRED_DELAY_LEVEL - 1] // 1000
    assert f"with delay level {_EXPIRED_DELAY_LEVEL} ({delay_s} s)" in GUIDE


def test_what_growing_concurrency_waits_for() -> None:
    least, most = CONCURRENCY
    assert _GROW_AFTER_S == 1
    assert f"messages wait for a second, the limit doubles, up to {most}" in GUIDE
    assert f"`({least}, {most})`, the default" in GUIDE
