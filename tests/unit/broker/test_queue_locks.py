"""Queue locks against a minimal model: a table of holders and times."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from example_counts import at_most
from turbopump.broker.queue_locks import QueueLocks
from turbopump.message import MessageQueue

QUEUES = [MessageQueue("T", "b", queue_id) for queue_id in range(3)]
queues = st.lists(st.sampled_from(QUEUES), unique=True)
groups = st.sampled_from(["g", "h"])
clients = st.sampled_from(["c1", "c2", "c3"])


class Locking(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.locks = QueueLocks(expiry_ms=60_000)
        self.model: dict[tuple[str, MessageQueue], tuple[str, int]] = {}
        self.now_ms = 0

    def holder(self, group: str, queue: MessageQueue) -> str | None:
        client, renewed_ms = self.model.get((group, queue), (None, 0))
        return client if self.now_ms - renewed_ms <= 60_000 else None

    @rule(group=groups, client=clients, wanted=queues)
    def lock(self, group: str, client: str, wanted: list[MessageQueue]) -> None:
        granted = self.locks.lock(group, client, wanted, self.now_ms)
        assert granted == [q for q in wanted if self.holder(group, q) in {None, client}]
        for queue in granted:
            self.model[group, queue] = (client, self.now_ms)

    @rule(group=groups, client=clients, released=queues)
    def unlock(self, group: str, client: str, released: list[MessageQueue]) -> None:
        self.locks.unlock(group, client, released)
        for queue in released:
            if self.model.get((group, queue), ("", 0))[0] == client:
                del self.model[group, queue]

    @rule(passed_ms=st.integers(0, 70_000))
    def wait(self, passed_ms: int) -> None:
        self.now_ms += passed_ms

    @rule()
    def sweep(self) -> None:
        self.locks.forget_expired(self.now_ms)

    @invariant()
    def holders_agree(self) -> None:
        for group in ("g", "h"):
            held = self.locks.held(group, self.now_ms)
            holders = {queue: client for client, queues in held.items() for queue in queues}
            assert all(holders.get(queue) == self.holder(group, queue) for queue in QUEUES)


Locking.TestCase.settings = settings(
    max_examples=at_most(40), stateful_step_count=25, deadline=None
)
TestLocking = Locking.TestCase


def test_a_lock_lasts_sixty_seconds_and_not_a_millisecond_less() -> None:
    locks = QueueLocks()
    assert locks.lock("g", "c1", QUEUES, 0) == QUEUES
    assert locks.lock("g", "c2", QUEUES, 60_000) == []
    assert locks.lock("g", "c2", QUEUES, 60_001) == QUEUES


def test_equal_queues_of_other_brokers_are_other_queues() -> None:
    locks = QueueLocks()
    locks.lock("g", "c1", [MessageQueue("T", "a", 0)], 0)
    assert locks.lock("g", "c2", [MessageQueue("T", "b", 0)], 0) == [MessageQueue("T", "b", 0)]


def test_no_lock_remains_for_removed_groups() -> None:
    locks = QueueLocks()
    for number in range(100):
        locks.lock(f"g{number}", "c", QUEUES, 0)
        locks.lock(f"empty{number}", "c", [], 0)
    locks.unlock("g0", "c", QUEUES)
    locks.forget_expired(60_001)
    assert not locks._groups
