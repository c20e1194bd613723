"""Committed offsets against a plain dictionary, across restarts and failing disks."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker_parts import FakeFile
from example_counts import at_most
from turbopump.broker.offsets import Offsets
from turbopump.errors import StoreDamaged, WriteFailed
from turbopump.tables import TableFile
from turbopump.wire.bodies import ConsumerOffsets, DataVersion
from vectors import DATA

groups = st.sampled_from(["g", "h"])
topics = st.sampled_from(["T", "U", "%RETRY%g"])
queue_ids = st.integers(0, 2)


class Committing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.file = FakeFile()
        self.offsets = Offsets(self.file)
        self.model: dict[tuple[str, str], dict[int, int]] = {}
        self.saved: dict[tuple[str, str], dict[int, int]] = {}

    @rule(group=groups, topic=topics, queue_id=queue_ids, offset=st.integers(0, 5))
    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        self.offsets.commit(group, topic, queue_id, offset)
        self.model.setdefault((group, topic), {})[queue_id] = offset

    @rule(source=groups, copy=groups, topic=topics)
    def clone(self, source: str, copy: str, topic: str) -> None:
        self.offsets.clone(source, copy, topic)
        if (source, topic) in self.model:
            self.model[copy, topic] = dict(self.model[source, topic])

    @rule(group=groups)
    def remove(self, group: str) -> None:
        self.offsets.remove_group(group)
        self.model = {key: queues for key, queues in self.model.items() if key[0] != group}

    @rule(topic=topics)
    def remove_topic(self, topic: str) -> None:
        self.offsets.remove_topic(topic)
        self.model = {key: queues for key, queues in self.model.items() if key[1] != topic}

    @rule(full=st.booleans())
    def persist(self, full: bool) -> None:
        self.file.full = full
        asyncio.run(self.offsets.saving.try_save())
        if not full:
            assert not self.offsets.saving.is_dirty
            self.saved = {key: dict(queues) for key, queues in self.model.items()}

    @rule()
    def crash(self) -> None:
        self.offsets = Offsets(self.file)
        self.offsets.load()
        self.model = {key: dict(queues) for key, queues in self.saved.items()}

    @invariant()
    def tables_agree(self) -> None:
        for group in ("g", "h"):
            assert self.offsets.topics_of(group) == {t for g, t in self.model if g == group}
            for topic in ("T", "U", "%RETRY%g"):
                assert self.offsets.of_topic(group, topic) == self.model.get((group, topic), {})
        assert self.offsets.groups_of("T") == {g for g, t in self.model if t == "T"}

    @invariant()
    def what_is_not_saved_is_dirty(self) -> None:
        assert self.offsets.saving.is_dirty or self.model == self.saved


Committing.TestCase.settings = settings(
    max_examples=at_most(50), stateful_step_count=25, deadline=None
)
TestCommitting = Committing.TestCase


def test_offsets_may_increase_and_decrease() -> None:
    offsets = Offsets(FakeFile())
    assert offsets.find("g", "T", 0) is None
    offsets.commit("g", "T", 0, 7)
    offsets.commit("g", "T", 0, 3)
    assert offsets.find("g", "T", 0) == 3
    assert offsets.find("g", "T", 1) is None
    offsets.commit_all("g", "T", {0: 9, 1: 0})
    assert offsets.of_topic("g", "T") == {0: 9, 1: 0}


def test_nothing_is_written_when_nothing_changed() -> None:
    file = FakeFile()
    offsets = Offsets(file)
    offsets.saving.save_now()
    offsets.commit("g", "T", 0, 1)
    offsets.saving.save_now()
    offsets.commit("g", "T", 0, 1)
    offsets.saving.save_now()
    asyncio.run(offsets.saving.try_save())
    assert len(file.saved) == 1


def test_failures_are_logged_once_and_lose_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    file = FakeFile()
    offsets = Offsets(file)
    offsets.commit("g", "T", 0, 1)
    file.full = True
    for _ in range(3):
        asyncio.run(offsets.saving.try_save())
    assert len(caplog.records) == 1
    with pytest.raises(WriteFailed):
        offsets.saving.save_now()
    file.full = False
    asyncio.run(offsets.saving.try_save())
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert ConsumerOffsets.decode(file.saved[-1]).offset_table == {"T@g": {0: 1}}


def test_lowered_offsets_are_saved_before_anything_else() -> None:
    """New messages get the offsets of lost ones: nothing shows that a saved one is too high."""
    file = FakeFile()
    offsets = Offsets(file)
    offsets.commit("g", "T", 0, 7)
    offsets.saving.save_now()
    offsets.clamp_to_ends(lambda *_: 3)
    assert ConsumerOffsets.decode(file.saved[-1]).offset_table == {"T@g": {0: 3}}


def test_a_full_disk_does_not_prevent_lowering(caplog: pytest.LogCaptureFixture) -> None:
    file = FakeFile()
    offsets = Offsets(file)
    offsets.commit("g", "T", 0, 7)
    file.full = True
    offsets.clamp_to_ends(lambda *_: 3)
    assert offsets.find("g", "T", 0) == 3
    assert offsets.saving.is_dirty
    assert "cannot be saved" in caplog.text


def test_commits_during_a_write_are_written_the_next_time() -> None:
    class Slow(FakeFile):
        def save(self, body: bytes, version: DataVersion) -> None:
            super().save(body, version)
            offsets.commit("g", "T", 0, 2)

    offsets = Offsets(Slow())
    offsets.commit("g", "T", 0, 1)
    asyncio.run(offsets.saving.try_save())
    assert offsets.saving.is_dirty


def test_files_of_apache_rocketmq_are_read_and_preserved(tmp_path: Path) -> None:
    path = tmp_path / "consumerOffset.json"
    path.write_bytes((DATA / "config" / "consumerOffset.json").read_bytes())
    offsets = Offsets(TableFile(path))
    offsets.load()
    assert offsets.of_topic("cg_manual", "Alpha") == {0: 42, 1: 7}
    assert offsets.topics_of("cg_store") == {"%RETRY%cg_store", "Gamma"}
    assert not offsets.saving.is_dirty
    offsets.commit("cg_manual", "Alpha", 0, 43)
    offsets.saving.save_now()
    again = Offsets(TableFile(path))
    again.load()
    assert again.snapshot == offsets.snapshot


def test_a_damaged_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "consumerOffset.json"
    path.write_text('{"offsetTable": {"T@g": 7}}')
    with pytest.raises(StoreDamaged, match="consumerOffset"):
        Offsets(TableFile(path)).load()
