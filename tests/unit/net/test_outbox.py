from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.net.limits import ConnectionLimits
from turbopump.net.outbox import Outbox, coalesced
from turbopump.testing import run_virtual, virtual_loop, virtual_time
from turbopump.wire.command import Command
from turbopump.wire.framing import encode, encode_parts

LIMITS = ConnectionLimits(write_pause_bytes=20_000)


class Recorder(asyncio.Transport):
    """Records what is written, each write separately."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.writes.append(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


ACTIONS = st.lists(
    st.one_of(st.sampled_from(["hold", "release", "turn"]), st.integers(0, 30_000)), max_size=40
)


@given(ACTIONS)
def test_frames_go_out_whole_and_in_the_order_they_were_put(actions: list[str | int]) -> None:
    async def main() -> None:
        transport = Recorder()
        outbox = Outbox(transport, LIMITS, virtual_loop(), lambda _: None)
        sent: list[bytes] = []
        for number, action in enumerate(actions):
            match action:
                case "hold":
                    outbox.hold()
                case "release":
                    outbox.release()
                case "turn":
                    await asyncio.sleep(0)
                case size:
                    command = Command(1, opaque=number, body=bytes(int(size)))
                    sent.append(encode(command))
                    outbox.put(encode_parts(command))
                    assert outbox.unwritten_bytes < LIMITS.write_pause_bytes
        outbox.release()
        assert b"".join(transport.writes) == b"".join(sent)
        assert outbox.unwritten_bytes == 0

    run_virtual(main())


@virtual_time()
async def test_a_turn_is_written_together_after_its_first_frame() -> None:
    transport = Recorder()
    outbox = Outbox(transport, LIMITS, virtual_loop(), lambda _: None)
    frame_bytes = len(encode(Command(1)))
    for _ in range(100):
        outbox.put(encode_parts(Command(1)))
    assert len(transport.writes) == 1, "the first frame does not wait"
    await asyncio.sleep(0)
    assert [len(data) // frame_bytes for data in transport.writes] == [1, 99]
    outbox.hold()
    outbox.put(encode_parts(Command(1)))
    assert len(transport.writes) == 2, "more may follow"
    outbox.put([bytes(LIMITS.write_pause_bytes)])
    assert len(transport.writes) == 3, "only the transport can tell that the peer does not keep up"


@virtual_time()
async def test_everything_is_joined_for_transports_that_do_not_pause_in_writelines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("turbopump.net.outbox._ALWAYS_JOINED", (Recorder.__module__,))
    monkeypatch.setattr(Recorder, "writelines", None)
    transport = Recorder()
    parts = encode_parts(Command(1, body=bytes(100_000)))
    Outbox(transport, LIMITS, virtual_loop(), lambda _: None).put(parts)
    assert transport.writes == [b"".join(parts)]


def test_only_small_neighbours_are_joined() -> None:
    large = memoryview(bytes(100_000))
    parts = coalesced([b"a", b"b", large, b"", b"c", large, large, b"d"])
    assert [len(part) for part in parts] == [2, 100_000, 1, 100_000, 100_000, 1]
    assert parts[1] is large
