"""Kills, restarts and pauses of a broker, and kills of consumers, under load."""

from __future__ import annotations

from torture.load import MEMBERS, NOTHING, RATE, Allowed, Load
from torture.member import THREADS
from torture.scenario import Row, Scenario

ASYNC = {"flushDiskType": "ASYNC_FLUSH"}
SYNC = {"flushDiskType": "SYNC_FLUSH"}

IN_FLIGHT = 40
"""Redeliveries that one disruption may cause: what listeners and send-backs have in flight."""

COPIES = 2
"""Extra dead letters that one disruption may cause: send-backs whose answer was lost."""


def kill_sync(scenario: Scenario) -> Row:
    return _killed(scenario, SYNC)


def kill_async(scenario: Scenario) -> Row:
    return _killed(scenario, ASYNC)


def _killed(scenario: Scenario, settings: dict[str, str]) -> Row:
    """Kill the broker repeatedly, also while it starts."""
    load, chance = Load(scenario, settings), scenario.chance
    load.start()
    row, kills, during_start = Row(scenario.name), 0, 0
    while scenario.left_s > 0 or not kills:
        load.pause(chance.uniform(0.2, 4.0))
        load.broker.kill()
        kills += 1
        if chance.random() < 0.25:
            load.broker.launch()
            load.pause(chance.uniform(0.1, 0.6))
            load.broker.kill()
            during_start += 1
        load.pause(chance.uniform(0.0, 1.0))
        load.broker.start()
        scenario.say(f"{kills} kills")
        row.expect(load.wait_for_progress(), "nothing was sent and consumed after a kill")
    row.did = f"{kills} kills, {during_start} while starting"
    return load.finish(row, allowed=Allowed(IN_FLIGHT, COPIES) * (kills + during_start))


def restart_sync(scenario: Scenario) -> Row:
    return _restarted(scenario, SYNC)


def restart_async(scenario: Scenario) -> Row:
    return _restarted(scenario, ASYNC)


def _restarted(scenario: Scenario, settings: dict[str, str]) -> Row:
    """Stop the broker cleanly and start it again."""
    load, chance = Load(scenario, settings), scenario.chance
    load.start()
    row, restarts = Row(scenario.name), 0
    while scenario.left_s > 0 or not restarts:
        load.pause(chance.uniform(0.2, 5.0))
        code = load.broker.stop()
        row.expect(code == 0, f"the broker exited with {code} after SIGTERM")
        load.pause(chance.choice((0.0, 0.0, chance.uniform(0.0, 2.0))))
        load.broker.start()
        restarts += 1
        scenario.say(f"{restarts} restarts")
        row.expect(load.wait_for_progress(), "nothing was sent and consumed after a restart")
    row.did = f"{restarts} restarts"
    return load.finish(row, allowed=Allowed(IN_FLIGHT, COPIES) * restarts)


def stopped(scenario: Scenario) -> Row:
    """Suspend the broker for up to 1.5 s; no send may be rejected because of it."""
    load, chance = Load(scenario, ASYNC), scenario.chance
    load.start()
    pauses = 0
    while scenario.left_s > 0 or not pauses:
        load.pause(chance.uniform(0.1, 1.0))
        load.broker.pause()
        load.pause(chance.choice((0.05, 0.25, 0.5, 1.5)))
        load.broker.resume()
        pauses += 1
        scenario.say(f"{pauses} pauses")
    row = Row(scenario.name, f"{pauses} pauses")
    row = load.finish(row, allowed=NOTHING)
    errors = sorted(load.accounts.errors.values())
    row.expect(not errors, f"{len(errors)} sends failed, such as: {errors[:1]}")
    return row


def nameserver_killed(scenario: Scenario) -> Row:
    """Kill and restart the only name server; clients that know the brokers do not need it."""
    load, chance = Load(scenario, ASYNC), scenario.chance
    load.start()
    kills = 0
    while scenario.left_s > 0 or not kills:
        load.pause(chance.uniform(0.2, 3.0))
        load.nameserver.process.kill()
        kills += 1
        load.pause(chance.uniform(0.0, 3.0))
        load.nameserver.start()
        scenario.say(f"{kills} kills")
    row = load.finish(Row(scenario.name, f"{kills} kills"), allowed=NOTHING)
    errors = sorted(load.accounts.errors.values())
    row.expect(not errors, f"{len(errors)} sends failed, such as: {errors[:1]}")
    return row


def consumer_killed(scenario: Scenario) -> Row:
    """Kill members, and add new ones, which sometimes leave cleanly."""
    load, chance = Load(scenario, ASYNC), scenario.chance
    load.start()
    kills, leaves = 0, 0
    while scenario.left_s > 0 or not kills:
        load.pause(chance.uniform(0.5, 4.0))
        victim = load.members.pop(chance.randrange(len(load.members)))
        if kills and chance.random() < 0.3:
            victim.terminate()
            leaves += 1
        else:
            victim.kill()
            kills += 1
        load.members.append(load.member(chance.choice(("threads", "async"))))
        scenario.say(f"{kills} kills")
    row = Row(scenario.name, f"{kills} kills, {leaves} left in order")
    # Each membership change moves queues, and a killed member last committed up to 0.5 s before.
    moved = Allowed(int(RATE) + MEMBERS * THREADS, COPIES, returns=1)
    return load.finish(row, allowed=moved * (kills + leaves))
