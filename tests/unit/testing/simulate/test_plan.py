"""Plans of the simulator."""

from __future__ import annotations

import pytest

from turbopump.testing.simulate.plan import planned


@pytest.mark.parametrize("seed", [8642, 9885, 3000395])
def test_no_fault_hits_a_name_server_that_does_not_run(seed: int) -> None:
    # Of the two name servers that were planned first, contested promotions leave one.
    plan = planned(seed)
    running = {f"ns{number}" for number in range(plan.nameservers)}
    hit = {name for fault in plan.faults for name in (fault.target, fault.other)}

    assert {name for name in hit if name.startswith("ns")} <= running
