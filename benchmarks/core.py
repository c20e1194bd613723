"""The time of each operation of the core, in both versions, in one run.

Run: ``benchmarks/run core [--seconds 0.5] [--only frames]``. Both versions take turns, and the best
of several rounds counts, in processor time. The ratio matters: absolute figures depend on the
machine and its load.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from measure import ROUNDS, print_table
from turbopump.core import reference

COUNT = 200
"""Messages of each action."""
BODY = b"x" * 128
HOST = bytes((10, 20, 30, 40, 0, 0, 42, 159))
TEXT = b"KEYS\x01order-42\x02TAGS\x01created\x02UNIQ_KEY\x017F00000147CE4E0E2F2A499A2CF90000"
BORN_MS = 1_794_728_296_982
FRAME_BYTES_MAX = 1 << 24
CLUSTER = b"CLUSTER\x01DefaultCluster"

Action = Callable[[], object]


def versions() -> dict[str, Any]:
    """Return the versions that can be loaded, by name."""
    found = {"plain": reference}
    with contextlib.suppress(ImportError):
        found["compiled"] = import_module("turbopump.core.compiled")
    return found


class Operations:
    """What the core does for `COUNT` messages, by the name of the operation."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._template = core.SendTemplate(
            "orders-producer", "orders", "broker-a", default_topic_queue_nums=4
        )
        self._stream = self._sent_frame() * COUNT
        self._sends = list(core.FrameDecoder(typed_requests=True).feed(self._stream))
        self._responses = core.SendResponses({}, HOST[:4], 10911)
        self._answers = self._answered()
        self._pulls = core.PullRequests(
            "billing", "orders", sys_flag=6, commit_offset=0, suspend_timeout_ms=15_000,
            subscription="*", sub_version=1, expression_type="TAG",
        )  # fmt: skip
        self._pulled = core.PullResponses(0, 0, "FOUND")
        self._block = self._added()
        self._data = bytes(self._block.place(0, COUNT, 1000, [0], BORN_MS))
        self._records = core.find_records(self._data, 0, len(self._data), 1000)
        self._batch = self._batch_body()
        assert len(self._records) == COUNT
        self._units = self._records.units()
        self._limits = core.UnitLimits(0, 1 << 24, COUNT, 0, 0)

    def actions(self) -> dict[str, Action]:
        core, data = self._core, self._data
        plain_frames, typed = core.FrameDecoder, {"typed_requests": True, "typed_responses": True}
        return {
            "frames: cut": lambda: list(plain_frames().feed(self._stream)),
            "frames: cut, send headers read": lambda: list(
                plain_frames(**typed).feed(self._stream)
            ),
            "frames: cut, responses read": lambda: list(plain_frames(**typed).feed(self._answers)),
            "sends: request written": lambda: [self._sent_frame() for _ in range(COUNT)],
            "sends: responses written": self._answered,
            "pulls: request written": lambda: [
                self._pulls.frame(number, 3, number, 32) for number in range(COUNT)
            ],
            "pulls: response written": lambda: [
                self._pulled.frame(number, 32, 0, number) for number in range(COUNT)
            ],
            "records: sends added to a block": self._added,
            "records: added and placed": self._placed,
            "records: a batch added": lambda: self._new_block().add_batch(
                b"orders", 2, self._batch, CLUSTER, 0, BORN_MS, HOST, HOST
            ),
            "records: found": lambda: core.find_records(data, 0, len(data), 1000),
            "records: found, checksums verified": lambda: core.find_records(
                data, 0, len(data), 1000, check_crc=True
            ),
            "records: read": lambda: core.read_records(data),
            "records: read, checksums verified": lambda: core.read_records(data, check_crc=True),
            "index: units": self._records.units,
            "index: keys": self._records.keys,
            "units: their messages taken": lambda: core.take_units(
                self._units, 0, memoryview(data), 1000, b"\x06orders", 2, 0, self._limits
            ),
            "columns: records scanned": lambda: core.scan_records(data),
            "columns: scanned, properties": lambda: core.scan_records(data)[0].properties(),
            "properties: parsed": lambda: [core.parse_properties(TEXT) for _ in range(COUNT)],
            "properties: found": lambda: [
                core.property_value(TEXT, b"UNIQ_KEY") for _ in range(COUNT)
            ],
            "ids: unique": lambda: core.unique_ids("7F00000147CE4E0E2F2A499A", range(COUNT)),
            "checksum of a body": lambda: [core.body_crc(BODY) for _ in range(COUNT)],
        }

    def _sent_frame(self) -> bytes:
        made = self._template.frame(7, 2, 0, BORN_MS, 0, TEXT, 0, BODY, FRAME_BYTES_MAX)
        return b"".join(made)

    def _answered(self) -> bytes:
        places = range(COUNT)
        found: bytes = self._responses.frames(self._sends, places, [2] * COUNT, places)
        return found

    def _new_block(self) -> Any:
        return self._core.Block(1 << 22, 1 << 22)

    def _added(self) -> Any:
        block = self._new_block()
        for send in self._sends:
            block.add_send(send, b"orders", 2, 0, CLUSTER, HOST, HOST)
        return block

    def _placed(self) -> memoryview:
        found: memoryview = self._added().place(0, COUNT, 1000, [0], BORN_MS)
        return found

    def _batch_body(self) -> bytes:
        size = 22 + len(BODY) + len(TEXT)
        head = size.to_bytes(4, "big") + bytes(12) + len(BODY).to_bytes(4, "big")
        return (head + BODY + len(TEXT).to_bytes(2, "big") + TEXT) * COUNT


def best_ns(actions: list[Action], seconds: float) -> list[float]:
    """Return the nanoseconds for one message of each action: the best of rounds in turns."""
    best = [float("inf")] * len(actions)
    for _ in range(ROUNDS):
        for place, action in enumerate(actions):
            until = time.monotonic() + seconds / ROUNDS
            while True:
                begun = time.process_time_ns()
                action()
                best[place] = min(best[place], (time.process_time_ns() - begun) / COUNT)
                if time.monotonic() > until:
                    break
    return best


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/run core", description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    parser.add_argument("--only", default="", help="operations whose name starts so")
    options = parser.parse_args()
    cores = {name: Operations(core).actions() for name, core in versions().items()}
    rows = []
    for name in cores["plain"]:
        if name.startswith(options.only):
            found = best_ns([actions[name] for actions in cores.values()], options.seconds)
            times = f"{found[0] / found[-1]:.1f}" if len(found) > 1 else ""
            rows.append([name, *(f"{each:,.0f}" for each in found), times])
    print_table(["ns a message of 128 bytes", *cores, "times as fast"], rows)


if __name__ == "__main__":
    main()
