"""Compressed bodies of a store's files: batches stay small however large the bodies inflate."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from offline_stores import message, reader_of, written
from turbopump.wire.compression import deflate
from turbopump.wire.sysflag import Compression, with_compression


@pytest.mark.slow
@pytest.mark.parametrize("on_bad_record", ["fail", "skip"])
def test_bodies_that_inflate_to_much_make_several_batches(
    tmp_path: Path, on_bad_record: str
) -> None:
    body = deflate(bytes(8 * 1024 * 1024), Compression.ZLIB)
    flag = with_compression(0, Compression.ZLIB)
    records = [replace(message(number, body=body), sys_flag=flag) for number in range(4)]
    reader = reader_of(written(tmp_path, records, 1 << 16), {"onBadRecord": on_bad_record})
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert [batch.num_rows for batch in batches] == [2, 2]
    assert all(batch.nbytes < 17 * 1024 * 1024 for batch in batches)
