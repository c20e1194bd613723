"""Which folders of an archive are merged: pure decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.spark.pipelines.archive_layout import BatchFolder, batch_value, merges, parsed_folder

DAY = "topic=orders/date=2026-11-15"
QUERY = "3f2a9c1e"


def folder(first: int, size: int = 10, *, partition: str = DAY, query: str = QUERY) -> BatchFolder:
    return BatchFolder(partition, query, first, first, files=1, file_bytes=size)


def test_names_are_read_as_they_are_written() -> None:
    one = BatchFolder(DAY, QUERY, 7, 7)
    many = BatchFolder(DAY, QUERY, 7, 12)
    assert one.path == f"{DAY}/batch=3f2a9c1e-0000000007"
    assert many.path == f"{DAY}/batch=3f2a9c1e-0000000007-0000000012"
    assert parsed_folder(one.path) == one
    assert parsed_folder(many.path) == many
    assert parsed_folder("batch=3f2a9c1e-0000000001") == BatchFolder("", QUERY, 1, 1)


@pytest.mark.parametrize("path", ["", DAY, f"{DAY}/batch=7", f"{DAY}/batch=3f2a9c1e-1", "a/b"])
def test_other_folders_are_not_batch_folders(path: str) -> None:
    assert parsed_folder(path) is None


def test_queries_with_their_own_checkpoints_do_not_share_names() -> None:
    assert batch_value("3f2a9c1e-1111", 0) != batch_value("4f2a9c1e-1111", 0)


def test_the_newest_batch_of_each_query_is_not_merged() -> None:
    """It may be written again, by a query that died before it recorded its completion."""
    other = "00000000"
    folders = [folder(0), folder(1), folder(2), folder(0, query=other), folder(1, query=other)]
    (merge,) = merges(folders, 1000)
    assert merge.sources == (folder(0), folder(1))
    assert merge.merged == BatchFolder(DAY, QUERY, 0, 1)


def test_newest_is_that_of_all_partitions() -> None:
    yesterday = "topic=orders/date=2026-11-14"
    folders = [folder(0, partition=yesterday), folder(1, partition=yesterday), folder(2)]
    (merge,) = merges(folders, 1000)
    assert merge.merged.path == f"{yesterday}/batch=3f2a9c1e-0000000000-0000000001"


def test_files_reach_about_the_target_size() -> None:
    folders = [folder(number, 40) for number in range(6)] + [folder(6, 200), folder(7)]
    found = merges(folders, 100)
    assert [[each.first for each in merge.sources] for merge in found] == [[0, 1], [2, 3], [4, 5]]
    assert [merge.files for merge in found] == [1, 1, 1]


def test_nothing_is_merged_again_needlessly() -> None:
    large = BatchFolder(DAY, QUERY, 0, 5, files=1, file_bytes=100)
    assert merges([large, folder(6, 100), folder(7)], 100) == ()


def test_folders_with_different_columns_are_not_merged() -> None:
    folders = [folder(number) for number in range(6)]
    (merge,) = merges(folders, 1000, lambda one, other: {one.first, other.first} <= {2, 3, 4})
    assert merge.sources == (folder(2), folder(3), folder(4))


@given(st.lists(st.integers(0, 300), max_size=30), st.integers(1, 400))
def test_every_batch_is_in_one_merge_at_most(sizes: list[int], target: int) -> None:
    folders = [folder(number, size) for number, size in enumerate(sizes)]
    found = merges(folders, target)
    merged = [each.first for merge in found for each in merge.sources]
    assert len(merged) == len(set(merged))
    assert not folders or folders[-1].first not in merged
    for merge in found:
        assert merge.files < sum(each.files for each in merge.sources)
        assert merge.merged.path not in {each.path for each in folders}
        numbers = [each.first for each in merge.sources]
        assert numbers == list(range(merge.merged.first, merge.merged.last + 1))
