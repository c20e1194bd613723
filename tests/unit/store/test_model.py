"""A store against a simple model: after operations in any order, it holds what was stored."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appending import append
from store_work import wait_idle
from turbopump.errors import DiskFull
from turbopump.machine import Machine
from turbopump.store import Filter, FlushMode, Found, NoMatch, OffsetTooSmall, Store, UpToDate
from turbopump.wire.hashing import tags_code
from turbopump.wire.record import decode_record
from unit.store.support import FaultyFiles, ManualClock, offset, record, small_config

QUEUES = st.integers(0, 2)
SIZES = st.integers(0, 1500)
TAGS = st.sampled_from(["", "A", "B", "Aa", "BB"])


class StoreMachine(RuleBasedStateMachine):
    """The model: for each queue all bodies and tags ever stored, and how many were deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.clock = ManualClock()
        self.files = FaultyFiles()
        self.queues: dict[int, list[tuple[bytes, str]]] = {0: [], 1: [], 2: []}
        self.count = 0

    @initialize(mode=st.sampled_from(FlushMode))
    def open(self, mode: FlushMode) -> None:
        self.config = small_config(mode)
        self._open()

    def _open(self) -> None:
        self.store = Store.open(
            self.root / "store", self.config, machine=Machine(files=self.files, clock=self.clock)
        )

    @rule(queue=QUEUES, sizes=st.lists(SIZES, min_size=1, max_size=3), tag=TAGS)
    def append(self, queue: int, sizes: list[int], tag: str) -> None:
        if sum(sizes) > 3500:
            sizes = sizes[:1]
        group = []
        for size in sizes:
            self.count += 1
            body = b"%d;" % self.count + b"x" * size
            group.append(record(body, queue_id=queue, TAGS=tag, KEYS=f"k{self.count}"))
        appended = append(self.store, group)
        appended.durable.result()
        assert appended.queue_offset == len(self.queues[queue])
        self.queues[queue] += [(one.body, tag) for one in group]

    @rule(by_ms=st.sampled_from([1, 150, 700, 2000, 20_000]))
    def time_passes(self, by_ms: int) -> None:
        self.clock.advance(by_ms)
        self.store.tick()

    @rule()
    def restart(self) -> None:
        wait_idle(self.store)
        self.store.close()
        self._open()
        assert not self.store.recovered.crashed

    @rule()
    def crash(self) -> None:
        """The process is killed: everything only in memory is lost."""
        wait_idle(self.store)
        copy = self.root / "copy"
        shutil.copytree(self.root / "store", copy)
        self.store.close()
        shutil.rmtree(self.root / "store")
        copy.rename(self.root / "store")
        self._open()
        assert self.store.recovered.crashed

    @rule(room=st.integers(0, 1600), queue=QUEUES)
    def disk_is_full(self, room: int, queue: int) -> None:
        wait_idle(self.store)
        self.files.bytes_left = room
        try:
            append(self.store, [record(b"x" * 1700, queue_id=queue)])
        except DiskFull:
            pass
        else:
            raise AssertionError("stored on a full disk")
        finally:
            wait_idle(self.store)
            self.files.bytes_left = None
        self.clock.advance(1000)

    @precondition(lambda self: self.count > 20)
    @rule()
    def oldest_segments_go(self) -> None:
        self.files.ratio = 0.86
        self.store.retain()
        self.files.ratio = 0.1

    @rule(queue=QUEUES, tag=TAGS)
    def filtered_read(self, queue: int, tag: str) -> None:
        low, high = self.store.queue_range("Topic", queue)
        if low == high:
            return
        wanted = Filter(tags_codes=frozenset({tags_code(tag)}))
        outcome = self.store.read("Topic", queue, low, 100, wanted)
        assert isinstance(outcome, Found | NoMatch)
        seen = range(low, outcome.next_offset)
        # The queue stores only hashes, and those of Aa and BB are the same.
        stored = [self.queues[queue][at] for at in seen]
        expected = [body for body, other in stored if tags_code(other) == tags_code(tag)]
        found = outcome.messages if isinstance(outcome, Found) else []
        assert [decode_record(message).stored_body for message in found] == expected

    @invariant()
    def everything_is_there(self) -> None:
        if not hasattr(self, "store"):
            return
        for queue, expected in self.queues.items():
            low, high = self.store.queue_range("Topic", queue)
            assert high == len(expected)
            at = low
            while at < high:
                outcome = self.store.read("Topic", queue, at, 32)
                assert isinstance(outcome, Found)
                bodies = [decode_record(one).stored_body for one in outcome.messages]
                assert bodies == [body for body, _ in expected[at : outcome.next_offset]]
                at = outcome.next_offset
            if expected:
                assert isinstance(self.store.read("Topic", queue, offset(high), 1), UpToDate)
            if low:
                outcome = self.store.read("Topic", queue, offset(low - 1), 1)
                assert isinstance(outcome, OffsetTooSmall)
        self._newest_key_is_found()

    def _newest_key_is_found(self) -> None:
        for stored in self.queues.values():
            if stored and stored[-1][0].startswith(b"%d;" % self.count):
                found = self.store.messages_by_key("Topic", f"k{self.count}", 9, 0, 1 << 60)
                assert [decode_record(one).stored_body for one in found] == [stored[-1][0]]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.root)


TestStore = pytest.mark.slow(StoreMachine.TestCase)
TestStore.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


class LongStoreMachine(StoreMachine):
    """The same, longer."""


TestStoreLong = pytest.mark.long(LongStoreMachine.TestCase)
TestStoreLong.settings = settings(max_examples=400, stateful_step_count=60, deadline=None)
