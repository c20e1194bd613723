"""The demo: a cluster, orders, two groups at work, Spark, dead letters and their second chance.

Run by ``scripts/demo``. Everything goes over real sockets into a real store in a temporary folder;
delay levels are shortened, so that retries take seconds. Every number in the summary is checked
against what was sent, and the exit code says whether all of them hold.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo.analytics import GROUP, Analytics, Window, analytics
from demo.board import Board
from demo.cluster import cluster
from demo.groups import BILLING, RETRIES_MAX, SHIPPING, Billing, Shipping
from demo.orders import FAILS_ALWAYS_EVERY, TOPIC, Order, make_orders, send_orders
from demo.report import Fact, draw, show_summary
from demo.view import watching
from turbopump import ClientConfig
from turbopump.admin import Destination, Outcome
from turbopump.admin.blocking import Admin
from turbopump.errors import TurbopumpError

ORDERS = 6000
ORDERS_PER_S = 600
FIRST_ORDERS = 100
WINDOW_S = 2
PATIENCE_S = 90.0
"""More than anything takes on a slow machine; whoever waits longer waits for ever."""

PLOT = "throughput-and-lag.png"
LOG = "cluster.log"
SETTINGS = {
    "messageDelayLevel": " ".join(["1s"] * 18),
    # Spark, the broker and everybody else share the machine: a send may have to wait its turn.
    "waitTimeMillsInSendQueue": "5000",
}


class Demo:
    """One run: where it reads and writes, and what it has seen."""

    def __init__(self, console: Console, folder: Path, count: int) -> None:
        self._console = console
        self._folder = folder
        self._orders: Sequence[Order] = tuple(make_orders(count))
        self._board = Board()
        self._shipping = Shipping(self._board)
        self._billing = Billing(self._board)

    def run(self) -> bool:
        """Show everything; return whether every number is what it must be."""
        with ExitStack() as stack:
            nameserver = stack.enter_context(cluster(SETTINGS, self._folder / LOG))
            admin = stack.enter_context(Admin(nameserver))
            admin.topics.create(TOPIC, queues=4)
            self._say("cluster", f"name server and broker are up at {nameserver}")
            self._say("spark", "is starting …")
            spark = stack.enter_context(analytics(nameserver, self._folder))
            self._say("orders", "are sent, and read by both groups and Spark at the same time")
            self._stream(nameserver, admin, spark)
            dead = sum(1 for _ in admin.dead_letters.list(BILLING))
            self._say("buried", f"{dead} orders, after {RETRIES_MAX} retries each")
            redriven = self._redrive(nameserver, admin)
            self._say("redriven", f"{redriven} of them, after the bug was mended")
            archived = spark.archived()
            windows = spark.windows(WINDOW_S)
        self._show_windows(windows)
        draw(self._board.samples, self._folder / PLOT)
        return show_summary(self._console, self._facts(dead, redriven, archived, windows))

    def _stream(self, nameserver: str, admin: Admin, spark: Analytics) -> None:
        """Send the orders while both groups and Spark read them, until all have read all."""
        board, total = self._board, len(self._orders)
        client = ClientConfig(nameserver, persist_interval_ms=500)
        with (
            self._shipping.consumer(client),
            self._billing.consumer(client),
            spark.archiving(board),
        ):
            # Spark takes seconds for its first batch: the first orders wake it up.
            self._send(nameserver, self._orders[:FIRST_ORDERS])
            board.wait_for("archived", FIRST_ORDERS, PATIENCE_S)
            with watching(self._console, board, total, lambda: _lags(admin)):
                self._send(nameserver, self._orders[FIRST_ORDERS:])
                board.wait_for("shipped", total, PATIENCE_S)
                board.wait_for("billed", total - self._hopeless, PATIENCE_S)
                board.wait_for("retries", self._retries, PATIENCE_S)
                board.wait_for("archived", total, PATIENCE_S)

    def _send(self, nameserver: str, orders: Sequence[Order]) -> None:
        send_orders(nameserver, orders, ORDERS_PER_S, lambda n: self._board.add("sent", n))

    def _redrive(self, nameserver: str, admin: Admin) -> int:
        """Mend the bug, give the dead letters back to the group, and wait until it is done."""
        self._billing.is_mended = True
        with self._billing.consumer(ClientConfig(nameserver)):
            outcomes = [
                done.outcome for done in admin.dead_letters.redrive(BILLING, to=Destination.RETRY)
            ]
            self._board.wait_for("billed", len(self._orders), PATIENCE_S)
        return outcomes.count(Outcome.SENT)

    @property
    def _hopeless(self) -> int:
        return sum(order.fails_always for order in self._orders)

    @property
    def _retries(self) -> int:
        """How often billing is called again for orders that failed, until it gives up."""
        return self._hopeless * RETRIES_MAX + sum(order.fails_once for order in self._orders)

    def _facts(
        self, dead: int, redriven: int, archived: tuple[int, int, int], windows: Sequence[Window]
    ) -> list[Fact]:
        board, total = self._board, len(self._orders)
        cents = sum(order.cents for order in self._orders)
        rows, different, archived_cents = archived
        return [
            Fact("orders sent and acknowledged", board["sent"], total),
            Fact("shipped", board["shipped"], total),
            Fact("shipped out of turn", self._shipping.out_of_turn, 0),
            Fact("retries of billing", board["retries"], self._retries),
            Fact("dead letters", dead, self._hopeless),
            Fact("dead letters redriven", redriven, self._hopeless),
            Fact("billed in the end", len(self._billing.billed), total),
            Fact("billed twice", sum(n > 1 for n in self._billing.billed.values()), 0),
            Fact("rows in Parquet", rows, total),
            Fact("different orders in Parquet", different, total),
            Fact("cents in Parquet", archived_cents, cents),
            Fact("orders in all windows", sum(window.orders for window in windows), total),
            Fact("cents in all windows", sum(window.cents for window in windows), cents),
        ]

    def _show_windows(self, windows: Sequence[Window]) -> None:
        table = Table(title=f"Orders by {WINDOW_S} seconds, summed up by Spark")
        for name in ("from", "orders", "revenue"):
            table.add_column(name, justify="right")
        for window in windows:
            table.add_row(window.start, f"{window.orders:,}", f"{window.cents / 100:,.2f}")
        self._console.print(table)

    def _say(self, subject: str, text: str) -> None:
        self._console.print(f"[bold cyan]{subject:>9}[/]  {text}")


def _lags(admin: Admin) -> Mapping[str, int]:
    """Return how many messages each group has not consumed yet, as the broker sees it."""
    lags = {}
    for group in (SHIPPING, BILLING, GROUP):
        try:
            lags[group] = admin.groups.progress(group).lag
        except TurbopumpError:
            # It has not consumed anything yet.
            lags[group] = 0
    return lags


def emptied(folder: Path) -> Path:
    """Make a folder, without what an earlier run left in it; anything else stays there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("orders", "checkpoints"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (PLOT, LOG, "spark.log"):
        (folder / name).unlink(missing_ok=True)
    return folder.resolve()


def enough_orders(text: str) -> int:
    """Return a number of orders that makes sense."""
    if not text.isdecimal() or int(text) < FAILS_ALWAYS_EVERY:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from {FAILS_ALWAYS_EVERY} on")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--orders", type=enough_orders, default=ORDERS, help="how many to send")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="folder for Parquet and plot"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    console = Console()
    started = time.perf_counter()
    holds = Demo(console, emptied(options.output), options.orders).run()
    verdict = "[green]all of it holds[/]" if holds else "[red]something is wrong[/]"
    console.print(f"{verdict}, after {time.perf_counter() - started:.0f} s")
    console.print(f"plot: {options.output / PLOT} · orders: {options.output / 'orders'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
