"""A push consumer from its start to its close."""

from __future__ import annotations

from pathlib import Path

from clusters import cluster
from consumers import Seen, committed, consuming, send
from turbopump.testing import virtual_time, wait_until


@virtual_time()
async def test_messages_come_to_the_listener_and_are_committed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"%d" % number for number in range(20)])
        seen = Seen()
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 20)
            await send(world, [b"later"])
            await wait_until(lambda: seen.count == 21)
        assert sorted(seen.bodies) == sorted([*(b"%d" % n for n in range(20)), b"later"])
        offsets = [await committed(world, queue_id) or 0 for queue_id in range(4)]
        assert sum(offsets) == 21
