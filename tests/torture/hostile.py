"""A cluster under load and under attack."""

from __future__ import annotations

from collections import Counter

from torture.attacks import ATTACKS, Broken, Target
from torture.disruptions import ASYNC
from torture.load import NOTHING, Load
from torture.peer import NoAnswer
from torture.scenario import Row, Scenario

SILENCE_MS_MAX = 5000.0
"""How long well-behaved senders may wait between acknowledgements."""


def attacked(scenario: Scenario) -> Row:
    """Attack repeatedly; well-behaved clients must not be affected."""
    load, chance = Load(scenario, ASYNC), scenario.chance
    load.start()
    addresses = load.broker.address, load.nameserver.address
    target = Target(*addresses, chance, scenario.processes, watch=load.pause)
    row, counts = Row(scenario.name), Counter[str]()
    while scenario.left_s > 0 or not counts:
        for attack in chance.sample(ATTACKS, len(ATTACKS)):
            if counts.total() >= len(ATTACKS) and scenario.left_s <= 0:
                break
            name = attack.__name__.replace("_", " ")
            scenario.say(name)
            try:
                attack(target)
                target.require_answers()
            except (Broken, NoAnswer, OSError) as error:
                row.expect(False, f"{name}: {error}")
            counts[name] += 1
            row.expect(load.broker.process.returncode is None, f"{name}: the broker ended")
    row.did = f"{counts.total()} attacks of {len(counts)} kinds"
    row = load.finish(row, allowed=NOTHING)
    silence_ms = load.accounts.longest_silence_ms()
    row.notes.append(f"longest silence {silence_ms:.0f} ms")
    row.expect(silence_ms <= SILENCE_MS_MAX, f"no acknowledgement for {silence_ms:.0f} ms")
    errors = sorted(load.accounts.errors.values())
    row.expect(not errors, f"{len(errors)} sends failed, such as: {errors[:1]}")
    return row
