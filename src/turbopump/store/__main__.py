"""``python -m turbopump.store inspect DIR``: report what a store directory holds. Never writes."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from turbopump.errors import TurbopumpError
from turbopump.machine.files import REAL_FILES
from turbopump.machine.process import drop_output
from turbopump.store.inspect import StoreReport, inspect, message_fields, messages


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; return 0 if it could read the directory, 2 if there is nothing to read."""
    options = _parser().parse_args(arguments)
    try:
        _check_is_store(options.directory)
        if options.messages:
            for view in messages(options.directory):
                print(msgspec.json.encode(message_fields(view)).decode())
        elif options.json:
            print(msgspec.json.encode(inspect(options.directory)).decode())
        else:
            print("\n".join(_table(inspect(options.directory))))
        # Here, not at interpreter exit: an error must be reported like any other.
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe.
        drop_output()
    except (TurbopumpError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            drop_output()
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m turbopump.store")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("inspect", help="print what is in a store directory")
    command.add_argument("directory", type=Path, metavar="DIR", help="the store's directory")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument(
        "--messages", action="store_true", help="print every message as a line of JSON"
    )
    return parser


def _check_is_store(directory: Path) -> None:
    if not REAL_FILES.is_directory(directory):
        raise NotADirectoryError(f"{directory} is not a directory")
    if not REAL_FILES.is_directory(directory / "commitlog"):
        raise FileNotFoundError(f"{directory} is not a store: it has no directory commitlog")


def _table(report: StoreReport) -> list[str]:
    state = "running or crashed" if report.crashed else "stopped"
    log = f"{report.messages} messages, log from {report.min_offset} to {report.max_offset}"
    lines = [
        f"{report.directory}: {state}, {log}",
        "",
        f"{'segment':<22}{'used bytes':>14}{'messages':>10}",
    ]
    lines += [
        f"{segment.name:<22}{segment.used_bytes:>14}{segment.messages:>10}"
        for segment in report.segments
    ]
    width = max((len(queue.topic) for queue in report.queues), default=5) + 2
    lines += ["", f"{'topic':<{width}}{'queue':>5}{'min':>12}{'max':>12}{'files':>7}"]
    lines += [
        f"{queue.topic:<{width}}{queue.queue_id:>5}{queue.min_offset:>12}{queue.max_offset:>12}"
        f"{queue.files:>7}"
        for queue in report.queues
    ]
    lines += ["", f"{'index':<22}{'entries':>14}{'from':>14}{'to':>14}"]
    lines += [
        f"{index.name:<22}{index.entries:>14}{index.begin_physical_offset:>14}"
        f"{index.end_physical_offset:>14}"
        for index in report.index
    ]
    lines += ["", "damage: none" if not report.damage else "damage:"]
    lines += [f"  {found.path} at {found.position}: {found.reason}" for found in report.damage]
    return lines


if __name__ == "__main__":
    sys.exit(main())
