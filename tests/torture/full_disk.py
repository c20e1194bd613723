"""A full disk: writes are rejected, reads continue, and the broker recovers once there is space."""

from __future__ import annotations

import time

from torture.disruptions import ASYNC, COPIES, IN_FLIGHT
from torture.load import Allowed, Load
from torture.messages import WORK
from torture.mounts import NotPermitted, fill, small_disk
from torture.processes import NotReady
from torture.reading import UNREADABLE, ask
from torture.scenario import Row, Scenario
from turbopump.wire.codes import ResponseCode

DISK_BYTES = 64 * 2**20
REFUSED_S = 20.0
HEALED_S = 60.0
_RATIOS = {
    # Only ENOSPC signals a full disk, and no messages are deleted to free space.
    "diskMaxUsedSpaceRatio": "100",
    "diskSpaceCleanForciblyRatio": "100",
    "diskSpaceWarningLevelRatio": "100",
}


def full_disk(scenario: Scenario) -> Row:
    """Fill the broker's disk repeatedly, also while it is restarted."""
    try:
        with small_disk(scenario.directory / "broker", DISK_BYTES) as file_system:
            return _filled(scenario, file_system)
    except NotPermitted as error:
        return Row(scenario.name, skipped=str(error))


def _filled(scenario: Scenario, file_system: str) -> Row:
    load, chance = Load(scenario, {**ASYNC, **_RATIOS}), scenario.chance
    load.logs_tracebacks = True
    load.start()
    row, fills, starts = Row(scenario.name), 0, 0
    filler = load.broker.directory / "filler"
    while scenario.left_s > 0 or not fills:
        load.pause(chance.uniform(1.0, 3.0))
        fill(filler)
        fills += 1
        scenario.say(f"{fills} times full")
        row.expect(_are_refused(load), f"sends were not refused within {REFUSED_S:g} s")
        _expect_reads(load, row, "on a full disk")
        # On tmpfs, and only there, reading a hole in a mapped file needs space.
        if file_system != "tmpfs" and chance.random() < 0.5:
            starts += 1
            _restart_on_full_disk(load, row, chance.choice(("stop", "kill")))
        filler.unlink()
        if load.broker.process.returncode is not None:
            load.broker.start()
        healed = load.wait_for_progress(HEALED_S)
        row.expect(healed, f"no message went through within {HEALED_S:g} s after space was freed")
    row.did = f"{fills} times full ({file_system}), {starts} starts on a full disk"
    return load.finish(row, allowed=Allowed(IN_FLIGHT, COPIES) * (fills + starts))


def _are_refused(load: Load) -> bool:
    load.accounts.read()
    errors, end = len(load.accounts.errors), time.monotonic() + REFUSED_S
    while time.monotonic() < end:
        load.pause(0.2)
        load.accounts.read()
        if len(load.accounts.errors) > errors:
            return True
    return False


def _restart_on_full_disk(load: Load, row: Row, ending: str) -> None:
    if ending == "kill":
        load.broker.kill()
    else:
        code = load.broker.stop()
        row.expect(code is not None, "the broker did not stop on a full disk")
    try:
        load.broker.start()
    except NotReady as error:
        row.expect(False, f"no start on a full disk after a {ending}: {error}")
        return
    _expect_reads(load, row, f"after a start on a full disk ({ending})")


def _expect_reads(load: Load, row: Row, when: str) -> None:
    """Require that old messages can be read."""
    try:
        answer = ask(load.broker.address, lambda client: client.pull(0, WORK, 0), wait_s=20.0)
        row.expect(answer.code == ResponseCode.SUCCESS, f"read {when}: {answer.remark}")
    except UNREADABLE as error:
        row.expect(False, f"read {when}: {type(error).__name__}: {error}")
