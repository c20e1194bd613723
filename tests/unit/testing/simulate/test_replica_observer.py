"""What a machine that writes after it was replaced should have known."""

from __future__ import annotations

from pathlib import Path

import pytest

from promotable import promotable_brokers
from turbopump.broker.broker import Broker
from turbopump.broker.replication.roles import RoleRecord
from turbopump.message import PhysicalOffset
from turbopump.testing import virtual_time
from turbopump.testing.simulate.replica_observer import _must_know, _Stale

PROMOTED_US = 100


def seen(
    broker: Broker, end: int, *, started_us: int = 0, suspended: bool = False, told: bool = False
) -> _Stale:
    return _Stale(broker, PhysicalOffset(end), suspended, RoleRecord(), started_us, told)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({}, {}, ""),
        # The write may have been the first of the two.
        ({}, {"suspended": True, "told": True}, ""),
        ({"suspended": True}, {"suspended": True}, "its writes are suspended"),
        # Confirmed as master since.
        ({"suspended": True}, {}, ""),
        ({"suspended": True, "told": True}, {"told": True}, "it has heard that it was replaced"),
        ({"started_us": 101}, {"started_us": 101}, "it has started since the promotion"),
    ],
    ids=["unaware", "told at the same time", "suspended", "confirmed", "told", "restarted"],
)
def test_what_a_replaced_master_that_writes_must_know(
    tmp_path: Path, before: dict[str, int], now: dict[str, int], expected: str
) -> None:
    @virtual_time()
    async def run() -> None:
        async with promotable_brokers(tmp_path, slaves=0) as replicas:
            broker = replicas.broker(0)
            found = _must_know(
                seen(broker, 1, **before),  # type: ignore[arg-type]
                seen(broker, 2, **now),  # type: ignore[arg-type]
                PROMOTED_US,
            )
            assert found == expected

    run()
