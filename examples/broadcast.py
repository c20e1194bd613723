"""Broadcasting: every member gets every message, and keeps its offsets in a local file."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from embedded import cluster
from turbopump import (
    ClientConfig,
    ConsumeContext,
    ConsumeResult,
    Message,
    MessageView,
    Producer,
    PushConsumer,
)

CHANGES = [b"red", b"green", b"blue"]


class Cache:
    """What each process would cache in memory."""

    def __init__(self) -> None:
        self.colors: set[bytes] = set()
        self.is_complete = threading.Event()

    def __call__(self, messages: Sequence[MessageView], _: ConsumeContext) -> ConsumeResult:
        self.colors.update(message.body for message in messages)
        if len(self.colors) == len(CHANGES):
            self.is_complete.set()
        return ConsumeResult.SUCCESS


def main() -> int:
    caches = {"one": Cache(), "two": Cache()}
    with cluster() as nameserver, tempfile.TemporaryDirectory() as directory:
        with Producer("colors-producer", nameserver=nameserver) as producer:
            for change in CHANGES:
                producer.send(Message("colors", change))
        # The instance names the offsets file; it is not needed on different machines.
        consumers = [
            PushConsumer(
                "caches",
                cache,
                client=ClientConfig(nameserver, instance=name),
                subscriptions={"colors": "*"},
                start_from="first",
                broadcast=True,
                offsets_directory=Path(directory),
            )
            for name, cache in caches.items()
        ]
        with consumers[0], consumers[1]:
            is_complete = all(cache.is_complete.wait(timeout=30) for cache in caches.values())
    for name, cache in caches.items():
        print(f"{name} has {len(cache.colors)} colors")
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
