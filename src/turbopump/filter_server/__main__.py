"""A filter server as a process: ``python -m turbopump.filter_server``, started by a broker.

Reads its configuration, a `FilterServerConfig` as a line of JSON, from standard input, prints the
port that it listens at, and ends when its standard input does: when the broker stops, or is killed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import msgspec

from turbopump.errors import TurbopumpError
from turbopump.filter_server.server import FilterServer
from turbopump.filters.server_config import FilterServerConfig
from turbopump.net.loop import run
from turbopump.net.sockets import SocketNetwork

_FAILED = 1


def main() -> int:
    """Run until standard input ends; return the exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # A terminal sends it to the broker too, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=FilterServerConfig)
    try:
        run(_serve(config))
    except TurbopumpError as error:
        print(f"filter server: {error}", file=sys.stderr)
        return _FAILED
    return 0


async def _serve(config: FilterServerConfig) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    loop.add_reader(sys.stdin.fileno(), ended.set)
    async with FilterServer(config, SocketNetwork()) as server:
        print(server.port, flush=True)
        await ended.wait()


if __name__ == "__main__":
    sys.exit(main())
