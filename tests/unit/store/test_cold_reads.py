"""Reads without waiting for the disk: as others, and nothing is touched that is not in memory."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from tempfile import NamedTemporaryFile

import numpy as np
import pytest

from appending import append
from store_work import log_of, queues_of
from turbopump.errors import StoreClosed
from turbopump.machine import Machine
from turbopump.machine.files import REAL_FILES, closing
from turbopump.message import PhysicalOffset
from turbopump.store import Filter, Found, ReadLimits, Store
from turbopump.store.outcomes import Cold
from turbopump.testing import Disk, virtual_loop, virtual_machine, virtual_time
from turbopump.testing.memory_files import BLOCK_BYTES
from turbopump.wire.hashing import tags_code
from unit.store.support import ManualClock, offset, record, small_config

ROOT = Path("/store")
READ_MS = 700
LIMITS = ReadLimits(memory_bytes_max=20_000, disk_bytes_max=4_000, recent_bytes=200_000)
CONFIG = small_config(
    segment_bytes=65_536, queue_segment_units=400, record_bytes_max=60_000, limits=LIMITS
)
FILTERS = (
    Filter(),
    Filter(tags_codes=frozenset({tags_code("A")})),
    Filter(properties=lambda text: b"odd" in text),
)


def machine_of(disk: Disk) -> Machine:
    return Machine(files=disk, background=disk.background, clock=ManualClock())


def cool_some(disk: Disk, random: Random) -> None:
    """Drop random parts of the log from memory."""
    disk.drop_caches()
    for path in disk.entries(ROOT / "commitlog"):
        with closing(disk, disk.open_to_read(path)) as fd:
            for at in range(0, disk.size(fd), BLOCK_BYTES):
                if random.random() < random.choice((0.1, 0.9)):
                    disk.fetch(fd, at, BLOCK_BYTES)


@pytest.mark.parametrize("seed", range(12))
def test_reads_from_memory_are_the_same_and_touch_only_memory(seed: int) -> None:
    random, disk = Random(seed), Disk()
    largest = random.choice((200, 3_000, 30_000))
    with Store.open(ROOT, CONFIG, machine_of(disk)) as store:
        for number in range(300):
            body = random.randbytes(random.randint(1, largest))
            kind = "odd" if number % 2 else "even"
            tags = random.choice("AB")
            queue_id = random.randrange(3)
            append(store, [record(body, queue_id=queue_id, TAGS=tags, KIND=kind)])
    with Store.open(ROOT, CONFIG, machine_of(disk)) as store:
        for wanted in FILTERS:
            for queue_id in range(3):
                cool_some(disk, random)
                count_max = random.choice((1, 8, 32))
                expected = drained(store, queue_id, count_max, wanted, from_memory=False)
                cool_some(disk, random)
                assert drained(store, queue_id, count_max, wanted, from_memory=True) == expected


def drained(
    store: Store, queue_id: int, count_max: int, wanted: Filter, *, from_memory: bool
) -> list[bytes]:
    """Read a queue to its end."""
    found: list[bytes] = []
    position, end = store.queue_range("Topic", queue_id)
    while position < end:
        if from_memory:
            outcome = store.read_from_memory("Topic", queue_id, position, count_max, wanted)
            if isinstance(outcome, Cold):
                store.fetch(outcome).result()
                outcome = store.read_from_memory("Topic", queue_id, position, count_max, wanted)
            assert not isinstance(outcome, Cold), "all that is needed is fetched at once"
        else:
            outcome = store.read("Topic", queue_id, position, count_max, wanted)
        if isinstance(outcome, Found):
            found += map(bytes, outcome.messages)
            for queue_offset in outcome.queue_offsets if from_memory else ():
                unit = queues_of(store).find("Topic", queue_id).unit(queue_offset)  # type: ignore[union-attr]
                assert unit is not None
                assert log_of(store).is_in_memory(unit[0], unit[0] + unit[1])
        assert outcome.next_offset > position
        position = outcome.next_offset
    return found


SEARCHES: dict[str, Callable[[Store], Iterator[object]]] = {
    "time": lambda store: store.find_offset("Topic", 0, 1),
    "marks": lambda store: store.find_marks("Topic", [0], [0]),
    "position": lambda store: store.find_message(PhysicalOffset(0)),
    "key": lambda store: store.find_by_key("Topic", "k", 9, 0, 1 << 60),
}


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_search_ends_when_the_store_is_closed_or_cut(
    search: Callable[[Store], Iterator[object]], is_cut: bool
) -> None:
    disk = Disk()
    with Store.open(ROOT, CONFIG, machine_of(disk)) as store:
        for _ in range(30):
            append(store, [record(b"x" * 9_000, KEYS="k")])
        last = store.last_message()
    with Store.open(ROOT, CONFIG, machine_of(disk)) as store:
        disk.drop_caches("*/commitlog/*")
        steps = search(store)
        paused = next(steps)
        assert paused is None or isinstance(paused, Cold)
        if is_cut:
            store.cut(last)
        else:
            store.close()
        with pytest.raises(StoreClosed):
            list(steps)


@pytest.mark.parametrize("seed", range(4))
def test_lookups_return_what_is_in_memory(seed: int) -> None:
    random, disk = Random(seed), Disk()
    largest = random.choice((200, 3_000, 30_000))
    with Store.open(ROOT, CONFIG, machine_of(disk)) as store:
        positions = [
            append(store, [record(random.randbytes(random.randint(1, largest)))]).physical_offset
            for _ in range(100)
        ]
    with Store.open(ROOT, CONFIG, machine_of(disk)) as store:
        for position in positions:
            cool_some(disk, random)
            for found in store.find_message(position):
                if isinstance(found, Cold):
                    store.fetch(found).result()
                else:
                    assert found is not None
                    assert log_of(store).is_in_memory(position, position + len(found))
        assert disk.operations["fetch"] > 0
        # What is no record is not read as one.
        for position in (
            PhysicalOffset(-1),
            PhysicalOffset(positions[-1] + 1),
            PhysicalOffset(1 << 40),
        ):
            assert not [each for each in store.find_message(position) if not isinstance(each, Cold)]


def test_what_this_process_has_written_last_is_read_without_asking() -> None:
    disk = Disk()
    with Store.open(ROOT, CONFIG, machine_of(disk)) as store:
        for _ in range(10):
            append(store, [record(b"x" * 1000)])
        disk.drop_caches()
        assert isinstance(store.read_from_memory("Topic", 0, offset(9), 1), Found)
    assert disk.operations["fetch"] == 0


def test_marks_of_many_queues_are_fetched_in_parts() -> None:
    """Others that need the disk wait for one part, not for all."""
    disk, count = Disk(), 600
    with Store.open(ROOT, CONFIG, machine_of(disk)) as store:
        for queue_id in range(count):
            append(store, [record(b"x" * 5_000, queue_id=queue_id)])
    with Store.open(ROOT, CONFIG, machine_of(disk)) as store:
        disk.drop_caches("*/commitlog/*")
        *parts, found = store.find_marks("Topic", range(count), [0] * count)
        assert not isinstance(found, Cold)
        assert -1 not in found[0]
        sizes = [len(each.parts) for each in parts if isinstance(each, Cold)]
        assert len(sizes) == len(parts) > 1
        assert max(sizes) <= 257


def test_marks_of_messages_that_do_not_exist() -> None:
    disk = Disk()
    with Store.open(ROOT, CONFIG, machine_of(disk)) as store:
        append(store, [record(b"x" * 5_000)])
    with Store.open(ROOT, CONFIG, machine_of(disk)) as store:
        disk.drop_caches("*/commitlog/*")
        # Nothing has to be fetched.
        assert list(store.find_marks("Topic", [0, 7], [1, 0])) == [([-1, -1], [-1, -1])]


@virtual_time()
async def test_a_store_that_closes_skips_reads_that_have_not_begun() -> None:
    disk = Disk(virtual_loop())
    with Store.open(ROOT, CONFIG, virtual_machine(disk)) as store:
        append(store, [record(bytes(12 * BLOCK_BYTES))])
    store = Store.open(ROOT, CONFIG, virtual_machine(disk))
    disk.drop_caches()
    disk.read_time = READ_MS / 1000
    cold = store.cold_part(store.min_offset, 1)
    assert cold is not None
    (part,) = cold.parts
    blocks = [part._replace(at=at, size=1) for at in range(0, 12 * BLOCK_BYTES, BLOCK_BYTES)]
    fetched = [store.fetch(Cold((block,))) for block in blocks]
    await asyncio.sleep(0.001)
    begun_s = virtual_loop().time()
    store.close()
    assert virtual_loop().time() - begun_s <= READ_MS / 1000
    assert 0 < disk.operations["fetch"] < len(blocks)
    assert all(each.done() for each in fetched)


@pytest.fixture
def disk_file() -> Iterator[Path]:
    """Create a file on a disk: the temporary directory of tests is in memory."""
    with NamedTemporaryFile(dir="/var/tmp") as file:
        yield Path(file.name)


def test_the_system_tells_what_is_in_memory(disk_file: Path) -> None:
    path, size = disk_file, 64 * 4096
    path.write_bytes(b"x" * size)
    with closing(REAL_FILES, REAL_FILES.open(path)) as fd:
        REAL_FILES.sync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    with closing(REAL_FILES, REAL_FILES.open_to_read(path)) as fd:
        mapped = REAL_FILES.map(fd, size)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        if REAL_FILES.is_in_memory(fd, 0, size, address):
            pytest.skip("/var/tmp is in memory too")
        REAL_FILES.fetch(fd, 8192, 4096)
        assert REAL_FILES.is_in_memory(fd, 8192, 4096, address)
        assert not REAL_FILES.is_in_memory(fd, 8191, 2, address)
        assert not REAL_FILES.is_in_memory(fd, 12287, 2, address)
        assert REAL_FILES.read_from_memory(fd, 4096, 8192) == b"x" * 4096
        assert REAL_FILES.read_from_memory(fd, 4096, 8191) is None
        REAL_FILES.fetch(fd, 0, size)
        assert REAL_FILES.is_in_memory(fd, 0, size, address)


def test_a_part_that_the_disk_cannot_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system returns what is before it, and fails only for a read that begins there."""
    path, bad_at = tmp_path / "file", 3 * 4096
    path.write_bytes(bytes(8 * 4096))
    read = os.pread

    def pread(fd: int, size: int, at: int) -> bytes:
        if at >= bad_at:
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, min(size, bad_at - at), at)

    monkeypatch.setattr(os, "pread", pread)
    with closing(REAL_FILES, REAL_FILES.open_to_read(path)) as fd:
        REAL_FILES.fetch(fd, 4096, 2 * 4096)
        with pytest.raises(OSError, match="cannot read"):
            REAL_FILES.fetch(fd, 4096, 4 * 4096)
