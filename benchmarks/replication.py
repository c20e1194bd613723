"""The cost of replication: sends without a slave, with one, and waiting for it; and catching up.

    python benchmarks/replication.py [--seconds 2] [--mib 256] [--only rates,catch-up]

Master and slave are separate processes on this machine, so both share its processors. Catching up
is compared with copying the same number of bytes over a socket into a file with `sendfile` and
`recv_into`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bare_frames import Flood, send_request
from block_appends import append_all
from broker_process import TIMEOUT_MS, Server, connected, free_port, started
from measure import print_table
from turbopump.net.connection import Connection
from turbopump.net.loop import run
from turbopump.net.sockets import SocketNetwork
from turbopump.store.store import Store
from turbopump.wire.bodies import KeyValues
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body
from turbopump.wire.hosts import host, split_address
from turbopump.wire.record import Record

ROUNDS = 3
IN_FLIGHT = (1, 8, 64)
BODIES = (128, 1024, 16 * 1024)
HERE = host("127.0.0.1", 10911)
PROPERTIES = b"UNIQ_KEY\x017F00000100002A9F0000000000000000\x02TAGS\x01TagA"
MIB = 1024 * 1024
ASKED_MAX = 6000
ASKED_EVERY_S = 0.02
"""How often a broker is polled for the end of its log; each answer costs it 0.1 to 0.2 ms."""


@contextmanager
def broker(directory: Path, **settings: object) -> Iterator[Server]:
    """Run a broker with these settings in a separate process."""
    file = directory.with_suffix(".conf")
    lines = {"brokerName": "bench", "listenPort": 0, "storePathRootDir": directory, **settings}
    file.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    with started("broker", "--config", str(file)) as made:
        yield made


@contextmanager
def pair(root: Path, role: str | None) -> Iterator[tuple[Server, Server | None]]:
    """Run a master, and optionally a slave."""
    port = free_port()
    with ExitStack() as stack:
        settings = {"brokerRole": role or "ASYNC_MASTER", "listenPort": port}
        master = stack.enter_context(broker(root / "master", haListenPort=port + 1, **settings))
        if role is None:
            yield master, None
            return
        yield master, stack.enter_context(slave(root / "slave", port + 1))


@contextmanager
def slave(directory: Path, port: int) -> Iterator[Server]:
    address = f"127.0.0.1:{port}"
    with broker(directory, brokerRole="SLAVE", brokerId=1, haMasterAddress=address) as made:
        yield made


async def ask_log_end(connection: Connection) -> int:
    """Return where a broker's log ends."""
    answer = await connection.request(request(RequestCode.GET_BROKER_RUNTIME_INFO), TIMEOUT_MS)
    assert answer.code == ResponseCode.SUCCESS, answer
    return int(KeyValues.decode(whole_body(answer)).table["commitLogMaxOffset"])


async def log_end(server: Server) -> int:
    async with connected(server.address) as connection:
        return await ask_log_end(connection)


async def until_end(server: Server, end: int) -> None:
    async with connected(server.address) as connection:
        for _ in range(ASKED_MAX):
            if await ask_log_end(connection) >= end:
                return
            await asyncio.sleep(ASKED_EVERY_S)
    raise TimeoutError(f"{server.address} does not reach {end}")


# --- rates ----------------------------------------------------------------------------------------


async def rate(master: Server, copy: Server | None, in_flight: int, seconds: float) -> list[float]:
    """Return sends per second, and the CPU time of master and slave per send, in µs."""
    used = [each.cpu_s if each is not None else 0.0 for each in (master, copy)]
    address, began = split_address(master.address), time.perf_counter()
    network = SocketNetwork()
    flood = await network.connect(*address, lambda: Flood([send_request()], in_flight, seconds))
    await flood.done
    took_s = time.perf_counter() - began
    if copy is not None:
        await until_end(copy, await log_end(master))
    now = [each.cpu_s if each is not None else 0.0 for each in (master, copy)]
    count = flood.answered
    costs = ((after - before) / count * 1e6 for before, after in zip(used, now, strict=True))
    return [count / took_s, *costs]


async def rates(seconds: float, _mib: int) -> None:
    roles = {"none": None, "async": "ASYNC_MASTER", "sync": "SYNC_MASTER"}
    found: dict[tuple[int, str], list[list[float]]] = {}
    for _ in range(ROUNDS):
        for name, role in roles.items():
            with tempfile.TemporaryDirectory() as root, pair(Path(root), role) as (master, copy):
                await warm(master, copy)
                for in_flight in IN_FLIGHT:
                    measured = await rate(master, copy, in_flight, seconds)
                    found.setdefault((in_flight, name), []).append(measured)
    rows = []
    for in_flight in IN_FLIGHT:
        medians = {
            name: [
                statistics.median(column) for column in zip(*found[in_flight, name], strict=True)
            ]
            for name in roles
        }
        plain = medians["none"][0]
        for name, (sends, master_us, slave_us) in medians.items():
            counts = [f"{in_flight}", name, f"{sends:,.0f}", f"{sends / plain:.2f}"]
            rows.append([*counts, f"{master_us:.0f}", f"{slave_us:.0f}"])
    columns = ["in flight", "replication", "sends/s", "ratio", "CPU µs master", "CPU µs slave"]
    print_table(columns, rows)


async def warm(master: Server, copy: Server | None) -> None:
    """Send until the slave is in sync; a SYNC_MASTER then answers with success."""
    async with connected(master.address) as connection:
        for _ in range(1000):
            answer = await connection.request(send_request(), TIMEOUT_MS)
            if answer.code == ResponseCode.SUCCESS:
                break
            await asyncio.sleep(0.05)
    if copy is not None:
        await until_end(copy, await log_end(master))


# --- catching up ----------------------------------------------------------------------------------


def fill(directory: Path, size: int, body_bytes: int) -> int:
    """Fill a log to a size, and return where it ends."""
    body = b"x" * body_bytes
    with Store.open(directory) as store:
        while store.written_end < size:
            records = [
                Record(
                    topic=b"Bench", queue_id=0, body=body, properties=PROPERTIES, flag=0,
                    sys_flag=0, born_timestamp_ms=1_700_000_000_000, born_host=HERE,
                    store_host=HERE, reconsume_times=0,
                )
                for _ in range(512)
            ]  # fmt: skip
            append_all(store, records)
        return store.written_end


def plain_copy(source: Path, target: Path, size: int) -> float:
    """Copy a file over loopback, and return the seconds it takes."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        with connection, source.open("rb") as file:
            connection.sendfile(file, count=size)

    thread = threading.Thread(target=serve)
    thread.start()
    began = time.perf_counter()
    buffer = memoryview(bytearray(MIB))
    with socket.create_connection(listening.getsockname()) as receiving, target.open("wb") as file:
        while received := receiving.recv_into(buffer):
            os.write(file.fileno(), buffer[:received])
    took_s = time.perf_counter() - began
    thread.join()
    listening.close()
    target.unlink()
    return took_s


async def catch_up(_seconds: float, mib: int) -> None:
    rows = []
    for body_bytes in BODIES:
        with tempfile.TemporaryDirectory() as name:
            root, port = Path(name), free_port()
            end = fill(root / "master", mib * MIB, body_bytes)
            count = end // (91 + 5 + body_bytes + len(PROPERTIES))
            first = root / "master" / "commitlog" / f"{0:020d}"
            copies = [plain_copy(first, root / "copy", min(end, mib * MIB)) for _ in range(ROUNDS)]
            plain = mib * MIB / statistics.median(copies)
            settings = {"listenPort": port, "haListenPort": port + 1}
            with broker(root / "master", **settings) as master:
                took, used, sent = [], [], []
                for number in range(ROUNDS):
                    before_s = master.cpu_s
                    with slave(root / f"slave{number}", port + 1) as copy:
                        began, started_s = time.perf_counter(), copy.cpu_s
                        await until_end(copy, end)
                        took.append(time.perf_counter() - began)
                        used.append(copy.cpu_s - started_s)
                        sent.append(master.cpu_s - before_s)
            speed = end / statistics.median(took)
            rows.append([
                f"{body_bytes:,}", f"{speed / MIB:,.0f}", f"{plain / MIB:,.0f}",
                f"{speed / plain:.2f}", f"{count / statistics.median(took):,.0f}",
                f"{statistics.median(used) / count * 1e6:.2f}",
                f"{statistics.median(sent) / count * 1e6:.2f}",
            ])  # fmt: skip
    print_table(
        [
            "body bytes", "MiB/s", "plain copy MiB/s", "ratio", "messages/s",
            "CPU µs slave, a message", "CPU µs master",
        ],
        rows,
    )  # fmt: skip


PARTS = {"rates": rates, "catch-up": catch_up}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--only", default=",".join(PARTS))
    options = parser.parse_args()
    for name in options.only.split(","):
        print(f"\n## {name}\n")
        await PARTS[name](options.seconds, options.mib)


if __name__ == "__main__":
    run(main())
