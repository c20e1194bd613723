"""Take an order as examples/outbox.py does, and kill this process at one of its steps.

Started as ``outbox_member.py NAMESERVER DATABASE ITEM STEP``; prints the steps it reaches.
"""

from __future__ import annotations

import itertools
import os
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from outbox import GROUP, Shop
from turbopump import TransactionProducer
from turbopump.client.transaction_ends import TransactionEnd

HALF_STORED = "half message stored"
LOCALLY_COMMITTED = "order stored"

_steps = itertools.count()


def step(name: str) -> None:
    sys.stdout.write(f"{name}\n")
    sys.stdout.flush()
    if next(_steps) == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)


class SteppingDatabase(sqlite3.Connection):
    """Reports each statement, and the steps before and after the commit."""

    def execute(self, *given: Any) -> sqlite3.Cursor:
        step(f"about to {given[0]}")
        return super().execute(*given)

    def __exit__(self, *raised: Any) -> Any:
        step("about to commit the order")
        result = super().__exit__(*raised)
        step(LOCALLY_COMMITTED)
        return result


class Steps:
    """A hook that reports requests to the broker as steps."""

    def before_send(self, group: str, sent: Any, queue: Any) -> None:
        step("about to send the half message")

    def after_send(self, group: str, sent: Any, queue: Any, outcome: Any) -> None:
        step(HALF_STORED)

    def transaction_ended(self, end: TransactionEnd) -> None:
        step("message committed")


def main() -> None:
    nameserver, path, item, _ = sys.argv[1:]
    shop = Shop(Path(path))
    with (
        TransactionProducer(
            GROUP, check=shop.check, nameserver=nameserver, hooks=[Steps()]
        ) as producer,
        closing(sqlite3.connect(path, timeout=30, factory=SteppingDatabase)) as database,
    ):
        shop.order(producer, database, item)
    step("closed")


if __name__ == "__main__":
    main()
