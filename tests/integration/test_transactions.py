"""Transactions over real sockets: from threads, and from processes that are killed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic, sleep

import pytest

import outbox_member
from outbox import GROUP, TOPIC, Shop
from servers import standalone
from turbopump import (
    Found,
    Message,
    MessageView,
    PullConsumer,
    TransactionProducer,
    TransactionState,
)
from turbopump.testing import running_server

WAIT_S = 60.0
SETTINGS = {"transactionTimeOut": "200", "transactionCheckInterval": "100"}


def wait_until(fact: Callable[[], bool]) -> None:
    end = monotonic() + WAIT_S
    while not fact():
        assert monotonic() < end, "condition not met in time"
        sleep(0.05)


def killed_at_each_step(nameserver: str, path: Path) -> list[list[str]]:
    """Return the steps of each process before it killed itself; the last one completes."""
    reached: list[list[str]] = []
    for number in itertools.count():
        program = [sys.executable, outbox_member.__file__, nameserver, str(path)]
        done = subprocess.run(
            [*program, f"item-{number:02}", str(number)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        reached.append(done.stdout.splitlines())
        if done.returncode == 0:
            return reached
        assert done.returncode == -signal.SIGKILL, done.stderr
    raise AssertionError("unreachable")


def rolled_back(shop: Shop) -> int:
    with closing(shop.connect()) as database:
        query = "SELECT count(*) FROM outcomes WHERE state = 'ROLLBACK'"
        return int(database.execute(query).fetchone()[0])


def bodies(nameserver: str) -> list[str]:
    """Return all messages of the topic, sorted."""
    found: list[str] = []
    with PullConsumer("audit", nameserver=nameserver) as consumer:
        for queue in consumer.queues(TOPIC):
            for offset in range(consumer.max_offset(queue)):
                outcome = consumer.pull(queue, offset, count_max=1)
                assert isinstance(outcome, Found)
                found += [message.body.decode() for message in outcome.messages]
    return sorted(found)


def test_threads_share_a_producer(tmp_path: Path) -> None:
    committed: list[str] = []

    def check(message: MessageView) -> TransactionState:
        is_stored = message.message_id in committed
        return TransactionState.COMMIT if is_stored else TransactionState.ROLLBACK

    def work(number: int) -> None:
        for kind in ("commit", "rollback", "unknown", "raise"):
            body = f"{kind}-{number}".encode()
            with suppress(LookupError), producer.transaction(Message(TOPIC, body)) as transaction:
                if kind == "raise":
                    raise LookupError(kind)
                if number % 2 and kind != "rollback":
                    committed.append(transaction.id)
                transaction.end(TransactionState[kind.upper()])

    with (
        running_server(tmp_path, SETTINGS) as server,
        TransactionProducer("pg", check=check, nameserver=server.nameserver) as producer,
        ThreadPoolExecutor(8) as threads,
    ):
        list(threads.map(work, range(20)))
        expected = sorted(
            [f"commit-{n}" for n in range(20)] + [f"unknown-{n}" for n in range(1, 20, 2)]
        )
        wait_until(lambda: len(bodies(server.nameserver)) == len(expected))
        assert bodies(server.nameserver) == expected


@pytest.mark.slow
def test_table_and_topic_agree_wherever_the_process_is_killed(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "shop.db")
    with standalone(tmp_path / "cluster", SETTINGS) as server:
        reached = killed_at_each_step(server.nameserver, shop.path)
        assert len(reached) >= 8, reached
        stored = [f"item-{n:02}" for n, steps in enumerate(reached) if is_stored(steps)]
        assert shop.items() == stored
        assert len(stored) >= 3
        lost = sum(is_half(steps) and not is_stored(steps) for steps in reached)
        assert lost >= 3
        with (
            TransactionProducer(GROUP, check=shop.check, nameserver=server.nameserver) as producer,
            closing(shop.connect()) as database,
        ):
            wait_until(lambda: rolled_back(shop) == lost)
            # Checked after all earlier ones, so afterwards none is open.
            with producer.transaction(Message(TOPIC, b"last")) as transaction:
                with database:
                    database.execute("INSERT INTO orders VALUES ('last')")
                    database.execute("INSERT INTO outcomes VALUES (?, 'COMMIT')", [transaction.id])
                transaction.unknown()
            wait_until(lambda: "last" in bodies(server.nameserver))
            assert bodies(server.nameserver) == [*stored, "last"] == shop.items()
            assert rolled_back(shop) == lost


def is_half(steps: list[str]) -> bool:
    return outbox_member.HALF_STORED in steps


def is_stored(steps: list[str]) -> bool:
    return outbox_member.LOCALLY_COMMITTED in steps
