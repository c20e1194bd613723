"""Store messages, read them back, find one by key: the store alone, without a broker.

Run: ``python examples/store_roundtrip.py``
"""

from __future__ import annotations

import tempfile
import time

from turbopump.message import QueueOffset
from turbopump.store import FlushConfig, FlushMode, Found, Store, StoreConfig, add_record
from turbopump.wire.hosts import host
from turbopump.wire.record import Record, decode_record

HERE = host("127.0.0.1", 10911)
# Small files for a small example. SYNC waits until a message is on disk.
CONFIG = StoreConfig(segment_bytes=1 << 20, flush=FlushConfig(mode=FlushMode.SYNC))


def order(number: int) -> Record:
    return Record(
        topic=b"orders",
        queue_id=0,
        body=f"order {number}".encode(),
        properties=f"KEYS\x01order-{number}\x02TAGS\x01created".encode(),
        born_timestamp_ms=time.time_ns() // 1_000_000,
        born_host=HERE,
        store_host=HERE,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        with Store.open(directory, CONFIG) as store:
            block = store.new_block()
            for number in range(5):
                add_record(block, order(number))
            appended = store.append(block)
            appended[-1].durable.result()
            print(f"stored 5 messages, the last at {appended[-1].physical_offset}")

        with Store.open(directory, CONFIG) as store:
            outcome = store.read("orders", 0, QueueOffset(2), 32)
            assert isinstance(outcome, Found)
            for message in outcome.messages:
                view = decode_record(message)
                print(view.queue_offset, view.body.decode())
            (found,) = store.messages_by_key("orders", "order-1", 32, 0, 1 << 62)
            print("by key:", decode_record(found).body.decode())


if __name__ == "__main__":
    main()
