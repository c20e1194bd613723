"""Outbox: an order in sqlite3 and its message in a topic, both or neither, despite crashes.

The table ``outcomes`` has a row for each transaction, written together with the order. When a
producer dies before it has reported the end of its transaction, the broker asks another one,
which looks the row up.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from embedded import cluster
from turbopump import (
    LitePullConsumer,
    Message,
    MessageView,
    TransactionProducer,
    TransactionState,
)

TOPIC = "outbox-orders"
GROUP = "outbox-shop"

SCHEMA = """
    CREATE TABLE IF NOT EXISTS orders (item TEXT NOT NULL UNIQUE);
    CREATE TABLE IF NOT EXISTS outcomes (transaction_id TEXT PRIMARY KEY, state TEXT NOT NULL);
"""


class Shop:
    """Takes orders; each thread, and each call of `check`, opens its own connection."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with closing(self.connect()) as database:
            database.executescript(SCHEMA)

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=30)

    def order(self, producer: TransactionProducer, database: sqlite3.Connection, item: str) -> None:
        """Store an order and send its message."""
        message = Message(TOPIC, item.encode())
        # `database` commits or rolls back first, then the message does the same.
        with producer.transaction(message) as transaction, database:
            database.execute("INSERT INTO orders VALUES (?)", [item])
            database.execute("INSERT INTO outcomes VALUES (?, 'COMMIT')", [transaction.id])

    def check(self, message: MessageView) -> TransactionState:
        """Report to a broker how a transaction of this group ended, or end it here.

        The first to insert the row decides. A transaction that is still running finds the row of
        the check, fails and is rolled back, so an answer never becomes wrong.
        """
        with closing(self.connect()) as database, database:
            database.execute(
                "INSERT OR IGNORE INTO outcomes VALUES (?, 'ROLLBACK')", [message.message_id]
            )
            (state,) = database.execute(
                "SELECT state FROM outcomes WHERE transaction_id = ?", [message.message_id]
            ).fetchone()
        return TransactionState[state]

    def items(self) -> list[str]:
        with closing(self.connect()) as database:
            return [item for (item,) in database.execute("SELECT item FROM orders ORDER BY item")]


def die_before_the_message_is_committed(shop: Shop, nameserver: str) -> None:
    """Order something, and exit as if killed once the order is stored."""
    with (
        TransactionProducer(GROUP, check=shop.check, nameserver=nameserver) as producer,
        closing(shop.connect()) as database,
        producer.transaction(Message(TOPIC, b"tea")) as transaction,
    ):
        with database:
            database.execute("INSERT INTO orders VALUES ('tea')")
            database.execute("INSERT INTO outcomes VALUES (?, 'COMMIT')", [transaction.id])
        os._exit(1)


def consumed(nameserver: str, count: int) -> list[str]:
    """Return the first messages of the topic, sorted."""
    with LitePullConsumer("outbox-mail", nameserver=nameserver, start_from="first") as consumer:
        consumer.assign(consumer.queues(TOPIC))
        return sorted(next(consumer).body.decode() for _ in range(count))


def main(nameserver: str, shop: Shop) -> int:
    with (
        TransactionProducer(GROUP, check=shop.check, nameserver=nameserver) as producer,
        closing(shop.connect()) as database,
    ):
        shop.order(producer, database, "coffee")
        try:
            shop.order(producer, database, "coffee")
        except sqlite3.IntegrityError as error:
            print(f"neither stored nor sent: {error}")
        subprocess.run([sys.executable, __file__, nameserver, str(shop.path)], check=False)
        print("a process died between its order and its message; the broker will check")
        found = consumed(nameserver, 2)
    print(f"in the table: {', '.join(shop.items())}; in the topic: {', '.join(found)}")
    return 0 if shop.items() == found == ["coffee", "tea"] else 1


if __name__ == "__main__":
    if len(sys.argv) > 2:
        die_before_the_message_is_committed(Shop(Path(sys.argv[2])), sys.argv[1])
    # By default, brokers check once a minute.
    soon = {"transactionTimeOut": "100", "transactionCheckInterval": "100"}
    with cluster(soon) as address, tempfile.TemporaryDirectory() as folder:
        code = main(address, Shop(Path(folder) / "shop.db"))
    sys.exit(code)
