"""Event loops in processes that were started in unusual ways."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, socket
from turbopump.net.loop import run

async def main():
    one, _ = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=one)
    writer.close()
    await writer.wait_closed()

run(main())
"""


def test_a_process_without_standard_input_may_close_sockets() -> None:
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", PROGRAM]
    assert subprocess.run(command, check=False, timeout=30).returncode == 0
