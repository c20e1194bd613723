"""The broker's clock is set, forward and back, while it runs."""

from __future__ import annotations

from brokers import Client
from torture.clock_broker import VARIABLE, jump
from torture.disruptions import ASYNC
from torture.load import NOTHING, Load
from torture.messages import FLOWS
from torture.peer import ask as ask_plainly
from torture.reading import ask
from torture.scenario import Row, Scenario
from turbopump.wire.codes import RequestCode
from turbopump.wire.headers import QueueOfTopic

LATE_MS_MAX = 10_000.0
DELETE_EXPIRED = 329
_JUMPS_MS = (
    100, -100, 30_000, -30_000, 3_600_000, -3_600_000, 86_400_000, -86_400_000, 5 * 86_400_000
)  # fmt: skip
_SETTINGS = {
    **ASYNC,
    "fileReservedTime": "1",
    "deleteWhen": ";".join(f"{hour:02d}" for hour in range(24)),
}


def jumping(scenario: Scenario) -> Row:
    """Set the clock repeatedly; delays, retention, locks and membership must not be affected."""
    path = scenario.directory / "clock"
    jump(path, 0)
    module, chance = "torture.clock_broker", scenario.chance
    load = Load(scenario, _SETTINGS, module, env={VARIABLE: str(path)})
    load.start()
    jumps = 0
    while scenario.left_s > 0 or not jumps:
        load.pause(chance.uniform(0.5, 5.0))
        jump(path, chance.choice(_JUMPS_MS))
        jumps += 1
        # Trigger now what a broker does every 10 s.
        ask_plainly(load.broker.address, DELETE_EXPIRED)
        scenario.say(f"{jumps} jumps")
    row = Row(scenario.name, f"{jumps} jumps")
    first = ask(load.broker.address, _first_offsets)
    row.expect(not any(first), f"retention deleted young messages, queues begin at {first}")
    row = load.finish(row, allowed=NOTHING)
    late_ms = load.accounts.latest_ms()
    row.notes.append(f"latest delayed message {late_ms:.0f} ms late")
    row.expect(late_ms <= LATE_MS_MAX, f"a delayed message came {late_ms:.0f} ms late")
    return row


async def _first_offsets(client: Client) -> list[int]:
    return [
        await client.offset(RequestCode.GET_MIN_OFFSET, QueueOfTopic(topic=topic, queue_id=0))
        for topic in FLOWS
    ]
