"""Run by the kill loop: stores messages and reports each one as soon as it is acknowledged.

``python killed_writer.py DIRECTORY FIRST_NUMBER``; reports are lines ``number queue offset``.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from turbopump.store import FlushConfig, FlushMode, Store, StoreConfig
from turbopump.store.append import add_record
from turbopump.wire.hosts import host
from turbopump.wire.record import Record

QUEUES = 5
CONFIG = StoreConfig(
    segment_bytes=64 * 1024,
    queue_segment_units=200,
    index_slots=100,
    index_entries=400,
    flush=FlushConfig(mode=FlushMode.SYNC, interval_ms=20, queue_interval_ms=20),
)
_HOST = host("127.0.0.1", 10911)


def body_of(number: int) -> bytes:
    """Return the body of the message with a number, so that a reader can check it."""
    chosen = random.Random(number)
    return b"%d:" % number + chosen.randbytes(chosen.choice((0, 10, 300, 5000)))


def message(number: int) -> Record:
    return Record(
        topic=b"Killed",
        queue_id=number % QUEUES,
        body=body_of(number),
        properties=b"UNIQ_KEY\x01%032d\x02KEYS\x01k%d" % (number, number),
        born_timestamp_ms=number,
        born_host=_HOST,
        store_host=_HOST,
    )


def report(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(directory: Path, number: int) -> None:
    chosen = random.Random(number)
    with Store.open(directory, CONFIG) as store:
        report("open")
        while True:
            count = chosen.choice((1, 1, 3, 20))
            block = store.new_block()
            for at in range(count):
                add_record(block, message(number + at))
            appended = store.append(block)
            appended[-1].durable.result()
            for at, one in enumerate(appended):
                report(f"{number + at} {(number + at) % QUEUES} {one.queue_offset}")
            number += count


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
