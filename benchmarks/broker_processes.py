"""How throughput and CPU time scale with 1, 2 and 4 broker processes.

    python benchmarks/broker_processes.py [--seconds 2] [--rounds 3] [--batch 1] [--plot FILE]
        [--update-docs]

``turbopump standalone --brokers N`` runs N brokers behind one name server; 1, 2 and 4 client
processes send to all of them, 32 sends in flight each. Rounds are interleaved. Throughput cannot
grow once there are more processes than cores; the CPU time still shows the cost per message.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from broker_process import Server, server, with_children
from measure import panels, table, update_docs

COUNTS = (1, 2, 4)
QUEUES = 8

Results = dict[tuple[int, int], list[dict[str, Any]]]
"""The results of each round, by number of brokers and of client processes."""


def measured(running: Server, clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """Send for the given time."""
    output = running.turbopump(
        *("bench", "produce", "Bench", "--json", f"--processes={clients}"),
        *(f"--seconds={options.seconds}", f"--warm-up={options.seconds / 4}"),
        f"--batch={options.batch}",
        *(f"--cpu-of={pid}" for pid in with_children(running.process.pid)),
    )
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def run(options: argparse.Namespace) -> Results:
    results: Results = {(brokers, clients): [] for brokers in COUNTS for clients in COUNTS}
    with ExitStack() as stack:
        clusters = {
            count: stack.enter_context(server(f"--brokers={count}") if count > 1 else server())
            for count in COUNTS
        }
        for running in clusters.values():
            running.turbopump("topic", "create", "Bench", f"--queues={QUEUES}")
        for _ in range(options.rounds):
            for (brokers, clients), found in results.items():
                found.append(measured(clusters[brokers], clients, options))
    return results


def medians(found: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(float(each[key]) for each in found)


def report(results: Results) -> str:
    columns = ["brokers, clients", "messages/s", "broker CPU µs", "client CPU µs"]
    rows = [
        [
            f"{brokers}, {clients}",
            f"{medians(found, 'messages_per_second'):,.0f}",
            f"{medians(found, 'watched_cpu_us'):.1f}",
            f"{medians(found, 'client_cpu_us'):.1f}",
        ]
        for (brokers, clients), found in results.items()
    ]
    return table(columns, rows)


def write_plot(results: Results, path: Path) -> None:
    """Plot throughput, and CPU time per message, against the number of brokers."""
    figure, ((rates, costs),) = panels(1, 2, (9, 3.2))
    for clients in COUNTS:
        of_clients = [results[brokers, clients] for brokers in COUNTS]
        label = f"{clients} client process{'es' if clients > 1 else ''}"
        every = [medians(found, "messages_per_second") for found in of_clients]
        rates.plot(COUNTS, every, marker="o", label=label)
        every = [medians(found, "watched_cpu_us") for found in of_clients]
        costs.plot(COUNTS, every, marker="o", label=label)
    for panel, title in ((rates, "messages a second"), (costs, "broker CPU µs a message")):
        panel.set_title(title, loc="left")
        panel.set_xlabel("brokers")
        panel.set_xticks(COUNTS)
        panel.set_ylim(bottom=0)
    rates.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1, help="messages per send")
    parser.add_argument(
        "--update-docs", action="store_true", help="write the table into README.md here"
    )
    parser.add_argument("--plot", type=Path, help="draw the medians (PNG or SVG; matplotlib)")
    options = parser.parse_args()
    results = run(options)
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}\n\n{report(results)}")
    if options.update_docs:
        update_docs({"broker-processes": report(results)})
    if options.plot is not None:
        write_plot(results, options.plot)


if __name__ == "__main__":
    main()
