"""The disk in memory: what it retains, what it loses, and how it fails."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from turbopump.machine.files import (
    REAL_FILES,
    Files,
    copy_tree,
    make_directory_durable,
    read_file,
    remove_tree,
    sync_path,
    write_file,
)
from turbopump.testing import Disk, virtual_loop, virtual_time

HOME = Path("/data/store")
FILE = HOME / "file"


def disk_with(data: bytes = b"old" * 400, random: Random | None = None) -> Disk:
    """Return a disk with one file that survives everything."""
    disk = Disk(random=random)
    make_directory_durable(disk, HOME)
    write_file(disk, FILE, data)
    sync_path(disk, FILE)
    disk.sync_directory(HOME)
    return disk


def overwrite(disk: Disk, data: bytes, at: int = 0, path: Path = FILE) -> None:
    fd = disk.open(path)
    disk.write(fd, data, at)
    disk.close(fd)


def lose_power(disk: Disk) -> None:
    disk.die()
    disk.lose_unsynced()
    disk.close_all()


# --- as the real one ------------------------------------------------------------------------------


def tour(files: Files, home: Path) -> list[object]:
    """Perform every operation once, and return the results."""
    seen: list[object] = []
    files.make_directory(home / "a" / "b")
    fd = files.open_new(home / "a" / "one")
    files.truncate(fd, 20_000)
    files.write(fd, b"x" * 10, 9000)
    mapped = memoryview(files.map(fd, 20_000))
    files.write(fd, b"seen in the map", 12_000)
    seen += [bytes(mapped[9000:9010]), bytes(mapped[12_000:12_015]), files.size(fd)]
    seen += [files.read(fd, 5, 19_998), files.read(fd, 5, 30_000)]
    seen += [list(files.data_ranges(fd, 0, 20_000)), list(files.data_ranges(fd, 9005, 9008))]
    files.sync(fd)
    files.truncate(fd, 9005)
    seen += [files.read(fd, 100, 8998)]
    files.close(fd)
    files.link(home / "a" / "one", home / "a" / "two")
    files.rename(home / "a" / "two", home / "a" / "b" / "three")
    files.remove(home / "a" / "nothing")
    files.remove_directory(home / "a")
    seen += [[str(each.relative_to(home)) for each in files.entries(home / "a")]]
    seen += [files.entries(home / "none"), files.file_size(home / "a" / "b" / "three")]
    seen += [files.is_file(home / "a"), files.is_directory(home / "a"), files.exists(home / "c")]
    copy_tree(files, home / "a", home / "copy")
    seen += [read_file(files, home / "copy" / "b" / "three")[-10:]]
    remove_tree(files, home / "a")
    seen += [files.exists(home / "a"), files.exists(home / "copy" / "one")]
    return seen


def test_it_does_what_the_real_disk_does(tmp_path: Path) -> None:
    assert tour(Disk(), Path("/somewhere")) == tour(REAL_FILES, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (lambda files, home: files.open(home / "none"), FileNotFoundError),
        (lambda files, home: files.open_new(home / "none" / "file"), FileNotFoundError),
        (lambda files, home: files.open_new(home), IsADirectoryError),
        (lambda files, home: read_file(files, home), IsADirectoryError),
        (lambda files, home: files.remove(home), (IsADirectoryError, PermissionError)),
        (lambda files, home: files.rename(home / "none", home / "new"), FileNotFoundError),
        (lambda files, home: files.file_size(home / "none"), FileNotFoundError),
        (lambda files, home: files.sync_directory(home / "none"), FileNotFoundError),
        (lambda files, home: files.map(files.open_new(home / "short"), 5), OSError),
    ],
)
def test_it_rejects_what_the_real_disk_rejects(
    tmp_path: Path, wrong: Callable[[Files, Path], object], kind: type[OSError]
) -> None:
    disk, home = Disk(), Path("/home")
    disk.make_directory(home)
    texts = []
    for files, where in ((disk, home), (REAL_FILES, tmp_path)):
        with pytest.raises(kind, match="cannot") as refused:
            wrong(files, where)
        assert str(where) in str(refused.value)
        texts.append(refused.value.strerror.partition(":")[0] if refused.value.strerror else "")
    assert texts[0] == texts[1]


def test_only_one_may_lock_a_file() -> None:
    disk = disk_with()
    first, second = disk.open(FILE), disk.open(FILE)
    disk.lock(first)
    with pytest.raises(BlockingIOError):
        disk.lock(second)
    disk.close(first)
    disk.lock(second)


# --- power loss -----------------------------------------------------------------------------------


def test_data_that_was_not_synced_is_lost() -> None:
    disk = disk_with()
    overwrite(disk, b"new", 600)
    assert read_file(disk, FILE)[600:603] == b"new"
    lose_power(disk)
    assert read_file(disk, FILE) == b"old" * 400
    overwrite(disk, b"new", 600)
    sync_path(disk, FILE)
    lose_power(disk)
    assert read_file(disk, FILE)[600:603] == b"new"


def test_a_kill_of_the_process_loses_nothing_that_was_written() -> None:
    disk = disk_with()
    overwrite(disk, b"new")
    disk.die()
    overwrite(disk, b"too late")
    disk.remove(FILE)
    write_file(disk, HOME / "other", b"too late")
    disk.close_all()
    assert read_file(disk, FILE) == b"new" + b"old" * 399
    assert disk.entries(HOME) == [FILE]


def test_cuts_and_growth_are_lost() -> None:
    disk = disk_with(b"x" * 5000)
    fd = disk.open(FILE)
    disk.truncate(fd, 10)
    disk.write(fd, b"y" * 30, 10)
    lose_power(disk)
    assert read_file(disk, FILE) == b"x" * 5000


@pytest.mark.parametrize("is_synced", [False, True])
def test_names_are_lost_that_were_not_synced_in_their_directory(is_synced: bool) -> None:
    disk = disk_with()
    disk.rename(FILE, HOME / "renamed")
    write_file(disk, HOME / "made", b"1")
    sync_path(disk, HOME / "made")
    disk.make_directory(HOME / "below")
    write_file(disk, HOME / "below" / "deep", b"2")
    sync_path(disk, HOME / "below" / "deep")
    disk.sync_directory(HOME / "below")
    if is_synced:
        disk.sync_directory(HOME)
    lose_power(disk)
    names = [path.name for path in disk.entries(HOME)]
    assert names == (["below", "made", "renamed"] if is_synced else ["file"])
    assert disk.exists(HOME / "below" / "deep") is is_synced


def test_a_removal_that_was_not_synced_is_undone() -> None:
    disk = disk_with()
    disk.remove(FILE)
    lose_power(disk)
    assert read_file(disk, FILE) == b"old" * 400


def test_a_whole_file_system_is_synced_with_all_names() -> None:
    disk = disk_with()
    overwrite(disk, b"new")
    write_file(disk, HOME / "made", b"1")
    assert disk.sync_file_system(disk.open_directory(HOME), 2)
    lose_power(disk)
    assert read_file(disk, FILE).startswith(b"new")
    assert read_file(disk, HOME / "made") == b"1"


def test_data_dropped_by_a_failed_sync_is_not_on_disk_after_the_next_one() -> None:
    """As on Linux: the pages count as clean, and the error was reported."""
    disk = disk_with()
    overwrite(disk, b"new")
    disk.fail_syncs()
    with pytest.raises(OSError, match=r"cannot flush: Input/output error.*/data/store/file"):
        sync_path(disk, FILE)
    disk.heal()
    sync_path(disk, FILE)
    assert read_file(disk, FILE).startswith(b"new")
    lose_power(disk)
    assert read_file(disk, FILE) == b"old" * 400


def test_data_dropped_by_a_failed_sync_can_be_written_again() -> None:
    disk = disk_with()
    overwrite(disk, b"new")
    disk.fail("sync", times=1)
    with pytest.raises(OSError, match="cannot flush"):
        sync_path(disk, FILE)
    overwrite(disk, b"new")
    sync_path(disk, FILE)
    lose_power(disk)
    assert read_file(disk, FILE).startswith(b"new")


def test_by_chance_sectors_survive_each_as_a_whole() -> None:
    kinds = set()
    for seed in range(40):
        disk = disk_with(b"o" * 2048, Random(seed))
        overwrite(disk, b"n" * 2048)
        lose_power(disk)
        data = read_file(disk, FILE)
        sectors = [data[at : at + 512] for at in range(0, 2048, 512)]
        assert all(sector in (b"o" * 512, b"n" * 512) for sector in sectors)
        kinds.add(bytes(sector[0] for sector in sectors))
    assert {b"oooo", b"nnnn"} < kinds, "all and nothing, among others"
    assert any(kind not in (b"oooo", b"nooo", b"nnoo", b"nnno", b"nnnn") for kind in kinds)


def test_by_chance_the_first_of_the_changes_of_a_directory_survive() -> None:
    kinds = set()
    for seed in range(40):
        disk = disk_with(random=Random(seed))
        for name in "abc":
            write_file(disk, HOME / name, b"")
        lose_power(disk)
        kinds.add("".join(path.name for path in disk.entries(HOME)))
    assert kinds == {"file", "afile", "abfile", "abcfile"}


def test_the_same_seed_loses_the_same() -> None:
    def survivor(seed: int) -> bytes:
        disk = disk_with(b"o" * 65536, Random(seed))
        overwrite(disk, b"n" * 65536)
        disk.chances.bit_flips = 1
        disk.lose_unsynced()
        return read_file(disk, FILE)

    assert [survivor(seed) for seed in range(9)] == [survivor(seed) for seed in range(9)]
    assert len({survivor(seed) for seed in range(9)}) > 3


# --- errors ---------------------------------------------------------------------------------------


def test_any_operation_fails_where_when_and_as_often_as_configured() -> None:
    disk = disk_with()
    disk.fail("rename", number=errno.EXDEV, matching="*/store/*", after=1, times=1)
    disk.rename(FILE, HOME / "second")
    with pytest.raises(OSError, match=r"cannot rename: .*/data/store/second") as failed:
        disk.rename(HOME / "second", HOME / "third")
    assert failed.value.errno == errno.EXDEV
    disk.rename(HOME / "second", HOME / "third")
    disk.fail_writes(matching="*/queues/*")
    overwrite(disk, b"new", path=HOME / "third")
    assert disk.is_disturbed
    disk.heal()
    assert not disk.is_disturbed


def test_open_files_are_known_by_their_new_names() -> None:
    disk = disk_with()
    fd = disk.open(FILE)
    disk.rename(FILE, HOME / "renamed")
    disk.fail_writes(matching="*/renamed")
    with pytest.raises(OSError, match=r"cannot write: .*/data/store/renamed"):
        disk.write(fd, b"x", 0)


def test_it_fills_up() -> None:
    disk = disk_with(b"x" * 4096)
    disk.capacity_bytes = 3 * 4096
    assert disk.used_bytes == 4096
    assert disk.used_ratio(HOME) == pytest.approx(1 / 3)
    overwrite(disk, b"y" * 8192, 4096)
    with pytest.raises(OSError, match="No space left on device"):
        overwrite(disk, b"z", 12_288)
    overwrite(disk, b"z" * 12_288)
    assert disk.used_ratio(HOME) == 1
    assert disk.space(HOME) == (3 * 4096, 0)


def test_writes_fail_and_are_torn_by_chance() -> None:
    disk = disk_with(b"o" * 1000, Random(1))
    disk.chances.write_fails = 0.5
    found = set[object]()
    for _ in range(100):
        try:
            overwrite(disk, b"n" * 1000)
            found.add("whole")
        except OSError as error:
            found.add(error.errno)
            found.add("torn" if b"n" in read_file(disk, FILE) else "nothing")
        disk.chances.write_fails = 0
        overwrite(disk, b"o" * 1000)
        disk.chances.write_fails = 0.5
    assert found == {"whole", errno.ENOSPC, errno.EIO, "torn", "nothing"}


def test_reads_fail_by_chance_until_the_disk_is_healed() -> None:
    disk = disk_with(random=Random(1))
    fd = disk.open(FILE)
    disk.chances.read_fails = 1.0
    for read in (
        lambda: disk.read(fd, 1, 0),
        lambda: disk.map(fd, 1),
        lambda: disk.open(FILE),
        lambda: disk.open_to_read(FILE),
        lambda: disk.entries(HOME),
    ):
        with pytest.raises(OSError, match="Input/output error"):
            read()
    disk.write(fd, b"new", 0)
    disk.sync(fd)
    assert disk.is_disturbed
    with disk.reads_succeeding():
        assert disk.read(fd, 3, 0) == b"new"
    with pytest.raises(OSError, match="cannot read: Input/output error"):
        disk.read(fd, 1, 0)
    disk.heal()
    assert disk.read(fd, 3, 0) == b"new"


def test_some_reads_fail_by_chance() -> None:
    disk = disk_with(random=Random(1))
    fd = disk.open(FILE)
    disk.chances.read_fails = 0.5
    failed = 0
    for _ in range(100):
        try:
            disk.read(fd, 1, 0)
        except OSError as error:
            failed += error.errno == errno.EIO
    assert 30 < failed < 70


def test_bits_flip() -> None:
    disk = disk_with(b"\0" * 100)
    assert disk.flip_bit(FILE, 7, bit=3) == 7
    assert read_file(disk, FILE)[7] == 8
    at = disk.flip_bit(FILE)
    assert sum(map(bool, read_file(disk, FILE))) == (1 if at == 7 else 2)


def test_operations_are_counted_and_reported_before_they_happen() -> None:
    disk = disk_with()
    told: list[tuple[str, str]] = []

    def tell(operation: str, path: Path) -> None:
        told.append((operation, path.name))
        if operation == "remove":
            disk.die()

    disk.on_operation = tell
    before = disk.operations["sync"]
    sync_path(disk, FILE)
    disk.remove(FILE)
    disk.on_operation = None
    disk.close_all()
    assert told == [("open", "file"), ("sync", "file"), ("remove", "file")]
    assert disk.operations["sync"] == before + 1
    assert disk.exists(FILE), "it died when the operation was reported"


# --- time -----------------------------------------------------------------------------------------


@virtual_time()
async def test_a_sync_on_the_loops_own_thread_blocks_everything() -> None:
    disk = Disk(virtual_loop())
    make_directory_durable(disk, HOME)
    write_file(disk, FILE, b"1")
    disk.sync_time = 0.25
    before_s = virtual_loop().time()
    sync_path(disk, FILE)
    assert virtual_loop().time() - before_s == pytest.approx(0.25)


# --- durable directories --------------------------------------------------------------------------


@pytest.mark.parametrize("last", range(1, 8))
def test_a_directory_is_durable_although_its_creator_was_killed(last: int) -> None:
    """Whichever operation was the last before the kill, the next call makes up for it."""
    disk = Disk()
    counted = 0

    def kill_at_last(_operation: str, _path: Path) -> None:
        nonlocal counted
        counted += 1
        if counted == last:
            disk.die()

    disk.on_operation = kill_at_last
    with suppress(FileNotFoundError):
        make_directory_durable(disk, HOME)
    disk.on_operation = None
    disk.close_all()
    make_directory_durable(disk, HOME)
    lose_power(disk)
    assert disk.exists(HOME)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EINVAL, errno.EROFS])
def test_the_parent_of_an_existing_directory_need_not_be_synced(number: int) -> None:
    disk = Disk()
    make_directory_durable(disk, HOME)
    disk.fail("sync_directory", number=number, matching=str(HOME.parent))
    make_directory_durable(disk, HOME)
    make_directory_durable(disk, HOME / "config")
    assert disk.exists(HOME / "config")
