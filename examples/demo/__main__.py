"""The demo: a cluster, orders, two consumer groups, Spark, dead letters and their redrive.

Run by ``scripts/demo``. Everything goes over real sockets into a real store in a temporary place;
delay levels are shortened so that retries take seconds. Every number in the summary is checked
against what was sent, and the exit code says whether all of them match.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo.analytics import GROUP, Analytics, Window, analytics
from demo.board import Board
from demo.cluster import Addresses, cluster
from demo.groups import BILLING, RETRIES_MAX, SHIPPING, Billing, Shipping
from demo.orders import FAILS_ALWAYS_EVERY, TOPIC, Order, make_orders, send_orders
from demo.report import Check, save_plot, show_summary
from demo.view import spinner, watching
from turbopump import ClientConfig, TurbopumpError
from turbopump.admin import Admin, Destination, Outcome

ORDERS = 6000
ORDERS_PER_S = 600
FIRST_ORDERS = 100
WINDOW_S = 2
TIMEOUT_S = 90.0
"""More than any step takes on a slow machine."""

PLOT = "throughput-and-lag.png"
LOG = "cluster.log"
SETTINGS = {
    "messageDelayLevel": " ".join(["1s"] * 18),
    # Spark, the broker and the clients share the machine: a send may have to wait its turn.
    "waitTimeMillsInSendQueue": "5000",
}


class Demo:
    """One run: where it reads and writes, and what it has counted."""

    def __init__(self, console: Console, directory: Path, count: int) -> None:
        self._console = console
        self._directory = directory
        self._orders: Sequence[Order] = tuple(make_orders(count))
        self._board = Board()
        self._shipping = Shipping(self._board)
        self._billing = Billing(self._board)

    def run(self, *, stays: bool) -> bool:
        """Run everything; return whether every number is as expected."""
        started = time.perf_counter()
        with ExitStack() as stack:
            addresses = stack.enter_context(cluster(SETTINGS, self._directory / LOG))
            admin = stack.enter_context(Admin(addresses.nameserver))
            admin.topics.create(TOPIC, queues=4)
            self._say("cluster", f"name server {addresses.nameserver}, broker {addresses.broker}")
            passed = self._run_with_spark(addresses.nameserver, admin)
            seconds = time.perf_counter() - started
            verdict = "[green]All checks passed[/]" if passed else "[red]Some checks failed[/]"
            self._console.print(f"{verdict} after {seconds:.0f} s.")
            self._console.print(
                f"Plot: {self._directory / PLOT}\nParquet files: {self._directory / 'orders'}",
                soft_wrap=True,
            )
            if stays:
                self._stay(addresses)
        return passed

    def _run_with_spark(self, nameserver: str, admin: Admin) -> bool:
        with ExitStack() as stack:
            with spinner(self._console, "spark", "starting"):
                spark = stack.enter_context(analytics(nameserver, self._directory))
            dead, redriven = self._stream(nameserver, admin, spark)
            with spinner(self._console, "spark", "checking the Parquet files"):
                archived = spark.archived()
                windows = spark.windows(WINDOW_S)
        self._show_windows(windows)
        save_plot(self._board.samples, len(self._orders), self._directory / PLOT)
        return show_summary(self._console, self._checks(dead, redriven, archived, windows))

    def _stream(self, nameserver: str, admin: Admin, spark: Analytics) -> tuple[int, int]:
        """Send the orders while both groups and Spark consume them, then redrive the dead letters.

        Return the numbers of dead letters and of those redriven.
        """
        board, total = self._board, len(self._orders)
        client = ClientConfig(nameserver, persist_interval=0.5)
        with (
            self._shipping.consumer(client),
            self._billing.consumer(client),
            spark.archiving(board),
        ):
            # Spark takes seconds for its first micro-batch: the first orders trigger it.
            with spinner(self._console, "spark", "running the first micro-batch"):
                self._send(nameserver, self._orders[:FIRST_ORDERS])
                board.wait_for(GROUP, FIRST_ORDERS, TIMEOUT_S)
            self._say("orders", "sent, and consumed by both groups and Spark at the same time")
            with watching(self._console, board, total, lambda: _lags(admin)):
                self._send(nameserver, self._orders[FIRST_ORDERS:])
                board.wait_for(SHIPPING, total, TIMEOUT_S)
                board.wait_for(BILLING, total - self._failing, TIMEOUT_S)
                board.wait_for("retries", self._retries, TIMEOUT_S)
                board.wait_for(GROUP, total, TIMEOUT_S)
                return self._dead_letters(admin), self._redrive(admin)

    def _send(self, nameserver: str, orders: Sequence[Order]) -> None:
        send_orders(nameserver, orders, ORDERS_PER_S, lambda n: self._board.add("sent", n))

    def _dead_letters(self, admin: Admin) -> int:
        """Return how many dead letters there are, once the last ones are stored."""
        found, deadline = 0, time.monotonic() + TIMEOUT_S
        while found < self._failing and time.monotonic() < deadline:
            found = sum(1 for _ in admin.dead_letters.list(BILLING))
        self._board.add("dead letters", found)
        return found

    def _redrive(self, admin: Admin) -> int:
        """Fix the bug, redrive the dead letters to the group, and wait until it has billed them."""
        self._billing.is_fixed = True
        outcomes = [
            done.outcome for done in admin.dead_letters.redrive(BILLING, to=Destination.RETRY)
        ]
        redriven = outcomes.count(Outcome.SENT)
        self._board.add("redriven", redriven)
        self._board.wait_for(BILLING, len(self._orders), TIMEOUT_S)
        return redriven

    @property
    def _failing(self) -> int:
        """How many orders cannot be billed until the bug is fixed."""
        return sum(order.fails_always for order in self._orders)

    @property
    def _retries(self) -> int:
        """How many redeliveries the failing orders cause until they are dead-lettered."""
        return self._failing * RETRIES_MAX + sum(order.fails_once for order in self._orders)

    def _checks(
        self, dead: int, redriven: int, archived: tuple[int, int, int], windows: Sequence[Window]
    ) -> list[Check]:
        board, total = self._board, len(self._orders)
        cents = sum(order.cents for order in self._orders)
        rows, distinct, archived_cents = archived
        return [
            Check("orders sent and acknowledged", board["sent"], total),
            Check("orders shipped", board[SHIPPING], total),
            Check("orders shipped out of order", self._shipping.out_of_order, 0),
            Check("billing retries", board["retries"], self._retries),
            Check("dead letters", dead, self._failing),
            Check("dead letters redriven", redriven, self._failing),
            Check("orders billed", len(self._billing.billed), total),
            Check("orders billed twice", sum(n > 1 for n in self._billing.billed.values()), 0),
            Check("rows in Parquet", rows, total),
            Check("distinct orders in Parquet", distinct, total),
            Check("revenue in Parquet, cents", archived_cents, cents),
            Check("orders in all windows", sum(window.orders for window in windows), total),
            Check("revenue in all windows, cents", sum(window.cents for window in windows), cents),
        ]

    def _show_windows(self, windows: Sequence[Window]) -> None:
        table = Table(title=f"Orders per {WINDOW_S} seconds, aggregated by Spark")
        for name in ("from", "orders", "revenue"):
            table.add_column(name, justify="right")
        for window in windows:
            table.add_row(window.start, f"{window.orders:,}", f"{window.cents / 100:,.2f}")
        self._console.print(table)

    def _say(self, subject: str, text: str) -> None:
        self._console.print(f"[bold cyan]{subject:>9}[/]  {text}")

    def _stay(self, addresses: Addresses) -> None:
        """Leave the cluster running until Ctrl-C or SIGTERM."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        options = f"--nameserver {addresses.nameserver}"
        try:
            self._console.print(
                f"\nThe cluster is running: name server {addresses.nameserver}, "
                f"broker {addresses.broker}.\n"
                "Try in another terminal:\n"
                f"  .venv/bin/turbopump topic status {TOPIC} {options}\n"
                f"  .venv/bin/turbopump group progress {BILLING} {options}\n"
                f"  .venv/bin/turbopump message tail {TOPIC} --last 5 --no-follow {options}\n"
                f"  .venv/bin/turbopump dlq list {BILLING} {options}\n"
                "Press Ctrl-C to stop it.",
                soft_wrap=True,
            )
            signal.pause()
        except KeyboardInterrupt:
            self._console.print("Stopping the cluster.")


def _lags(admin: Admin) -> Mapping[str, int]:
    """Return the lag of each group, as the broker sees it."""
    lags = {}
    for group in (SHIPPING, BILLING, GROUP):
        try:
            lags[group] = admin.groups.progress(group).known_lag
        except TurbopumpError:
            # It has not consumed anything yet.
            lags[group] = 0
    return lags


def cleared(directory: Path) -> Path:
    """Create a directory, or remove from it what an earlier run left; other files stay."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("orders", "checkpoints"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in (PLOT, LOG, "spark.log"):
        (directory / name).unlink(missing_ok=True)
    return directory


def order_count(text: str) -> int:
    """Parse the number of orders."""
    if not text.isdecimal() or int(text) < FAILS_ALWAYS_EVERY:
        raise argparse.ArgumentTypeError(
            f"expected a number of at least {FAILS_ALWAYS_EVERY}, got {text!r}"
        )
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--orders", type=order_count, default=ORDERS, help="orders to send (default: %(default)s)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        help="directory for the Parquet files and the plot (default: %(default)s)",
    )
    parser.add_argument(
        "--stay", action="store_true", help="leave the cluster running until Ctrl-C"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    console = Console()
    passed = Demo(console, cleared(options.output), options.orders).run(stays=options.stay)
    if not options.stay:
        console.print("Next: scripts/demo --stay keeps the cluster running for you to explore;")
        console.print("      docs/guide/producer.md shows how to send your own messages.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
