"""Exactly-once effect: results and offsets in one sqlite3 transaction, despite kills.

A consumer bills orders. Its offsets are in the table ``offsets`` of the same database, and the
listener moves them in the transaction in which it writes its bills. Two processes are killed on the
way: one before a transaction is committed, one right after it. Each order is billed once.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Event

from embedded import cluster
from turbopump import (
    ClientConfig,
    ConsumeContext,
    ConsumeResult,
    Message,
    MessageQueue,
    MessageView,
    Producer,
    PushConsumer,
)

TOPIC = "billed-orders"
ORDERS = 20

SCHEMA = """
    CREATE TABLE IF NOT EXISTS bills (number INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS offsets (
        topic TEXT, broker TEXT, queue_id INTEGER, offset INTEGER NOT NULL,
        PRIMARY KEY (topic, broker, queue_id)
    );
"""
LOAD = "SELECT offset FROM offsets WHERE (topic, broker, queue_id) = (?, ?, ?)"
ADVANCE = """
    INSERT INTO offsets VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET offset = max(offset, excluded.offset)
"""
REMOVE = "DELETE FROM offsets WHERE (topic, broker, queue_id) = (?, ?, ?)"


class Billing:
    """The listener, and the offset store of its consumer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_complete = Event()
        self.changes: list[tuple[str, list[str | int]]] = []
        with closing(self.connect()) as database:
            database.executescript(SCHEMA)

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=30)

    # --- the listener -----------------------------------------------------------------------------

    def __call__(self, messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        key = row(context.queue)
        with closing(self.connect()) as database, database:
            # Before reading: a former owner of the queue may still be writing.
            database.execute("BEGIN IMMEDIATE")
            found = database.execute(LOAD, key).fetchone()
            for message in messages:
                if found is None or message.queue_offset >= found[0]:
                    database.execute("INSERT INTO bills VALUES (?)", [int(message.text)])
                    database.execute(ADVANCE, [*key, message.queue_offset + 1])
            self.before_commit()
        self.after_commit()
        return ConsumeResult.SUCCESS

    def before_commit(self) -> None:
        """Die here in some processes."""

    def after_commit(self) -> None:
        if len(self.bills()) >= ORDERS:
            self.is_complete.set()

    # --- the offset store -------------------------------------------------------------------------

    def load(self, queue: MessageQueue) -> int | None:
        with closing(self.connect()) as database:
            found = database.execute(LOAD, row(queue)).fetchone()
        return None if found is None else found[0]

    def advance(self, queue: MessageQueue, offset: int) -> None:
        self.changes.append((ADVANCE, [*row(queue), offset]))

    def remove(self, queue: MessageQueue) -> None:
        self.changes.append((REMOVE, row(queue)))

    def commit(self) -> None:
        # If it fails, the consumer repeats all of them.
        changes, self.changes = self.changes, []
        with closing(self.connect()) as database, database:
            for statement, values in changes:
                database.execute(statement, values)

    def bills(self) -> list[int]:
        with closing(self.connect()) as database:
            return [number for (number,) in database.execute("SELECT number FROM bills")]


def row(queue: MessageQueue) -> list[str | int]:
    return [queue.topic, queue.broker, queue.queue_id]


class DiesBeforeCommit(Billing):
    def before_commit(self) -> None:
        if len(self.bills()) >= 5:
            os._exit(1)


class DiesAfterCommit(Billing):
    def after_commit(self) -> None:
        if len(self.bills()) >= 10:
            os._exit(1)


def consumer(nameserver: str, billing: Billing) -> PushConsumer:
    return PushConsumer(
        "billing",
        billing,
        # With the same client id, a restarted process gets its locks back immediately.
        client=ClientConfig(nameserver, instance="billing-1"),
        subscriptions={TOPIC: "*"},
        start_from="first",
        orderly=True,
        offset_store=billing,
    )


def main(nameserver: str, path: Path) -> int:
    with Producer("orders-producer", nameserver=nameserver) as producer:
        for number in range(ORDERS):
            producer.send(Message(TOPIC, b"%d" % number))
    for kind in (DiesBeforeCommit, DiesAfterCommit):
        command = [sys.executable, __file__, nameserver, str(path), kind.__name__]
        code = subprocess.run(command, check=False).returncode
        print(f"{kind.__name__} ended with {code}; {len(Billing(path).bills())} orders are billed")
    billing = Billing(path)
    with consumer(nameserver, billing):
        billing.is_complete.wait(timeout=60)
    bills = sorted(billing.bills())
    print(f"{len(bills)} bills for {len(set(bills))} orders")
    return 0 if bills == list(range(ORDERS)) else 1


if __name__ == "__main__":
    if len(sys.argv) > 3:
        kind = {"DiesBeforeCommit": DiesBeforeCommit, "DiesAfterCommit": DiesAfterCommit}
        with consumer(sys.argv[1], kind[sys.argv[3]](Path(sys.argv[2]))) as running:
            running.wait()
        sys.exit(0)
    with cluster() as address, tempfile.TemporaryDirectory() as folder:
        code = main(address, Path(folder) / "billing.db")
    sys.exit(code)
