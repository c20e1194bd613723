"""A cluster for the examples: inside this process, or the one whose name server is given.

::

    python examples/quick_start_producer.py                     # brings its own
    python examples/quick_start_producer.py 127.0.0.1:9876      # uses one that runs
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from turbopump.broker.broker import Broker
from turbopump.broker.config_keys import parse
from turbopump.nameserver import NameServer, NameServerConfig
from turbopump.net.loop import run
from turbopump.net.sockets import SocketNetwork

Running = tuple[str, asyncio.AbstractEventLoop, asyncio.Event]


@contextmanager
def cluster() -> Iterator[str]:
    """Give the address of a name server, of a cluster in a thread of its own if none is given."""
    if len(sys.argv) > 1:
        yield sys.argv[1]
    else:
        with own_cluster() as address:
            yield address


@contextmanager
def own_cluster() -> Iterator[str]:
    """Run a cluster in a thread of its own and give the address of its name server."""
    ready: Future[Running] = Future()
    with tempfile.TemporaryDirectory() as directory:
        thread = threading.Thread(target=lambda: run(_serve(Path(directory), ready)))
        thread.start()
        address, loop, stop = ready.result(timeout=10)
        try:
            yield address
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()


async def _serve(directory: Path, ready: Future[Running]) -> None:
    stop = asyncio.Event()
    names_config = NameServerConfig(port=0, kv_config_path=directory / "kvConfig.json")
    async with NameServer(names_config, SocketNetwork()) as names:
        settings = {
            "storePathRootDir": str(directory / "store"),
            "namesrvAddr": names.address,
            "brokerName": "example",
            "listenPort": "0",
        }
        async with Broker(parse(settings)):
            ready.set_result((names.address, asyncio.get_running_loop(), stop))
            await stop.wait()


if __name__ == "__main__":
    with cluster() as nameserver:
        print(f"a cluster ran, with its name server at {nameserver}")
