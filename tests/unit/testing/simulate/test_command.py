"""The command: what it prints, its exit code, and that a seed decides everything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from turbopump.testing.simulate.__main__ import main
from turbopump.testing.simulate.checks.durability import AcknowledgedKept
from turbopump.testing.simulate.fault_plan import FaultKind
from turbopump.testing.simulate.plan import GroupKind, SendMode, planned
from turbopump.testing.simulate.run import simulate
from turbopump.testing.simulate.transaction_plan import Ending

SEEDS = (3, 11)


@pytest.mark.slow
def test_the_command_reports_what_was_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:2"]) == 0
    out = capsys.readouterr().out
    for text in ("2 seeds in", "seeds/s", "virtual time:", "faults injected:", "duplicates:"):
        assert text in out
    assert "failed: none" in out


@pytest.mark.slow
def test_a_seed_that_fails_shows_its_history_and_how_to_repeat_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AcknowledgedKept, "_is_there", lambda *_: False)
    assert main(["--seeds", "4:5"]) == 1
    out = capsys.readouterr().out
    assert "producer-0    sends p0-0 to" in out
    assert "violated: acknowledged messages are kept: " in out
    assert "repeat with: python -m turbopump.testing.simulate --seed 4" in out
    first = simulate(4)
    second = simulate(4)
    assert first.violations == second.violations
    assert first.digest == second.digest


@pytest.mark.slow
def test_one_seed_prints_its_history(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "5"]) == 0
    out = capsys.readouterr().out
    assert "everything is closed" in out
    assert f"digest: {simulate(5).digest}" in out


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["--seeds", "7"], None),
        (["--seeds", "5:5"], "expected 0 <= A < B, got '5:5'"),
        (["--seeds", "-3:5"], "expected"),
        (["--seeds", "a:b"], "expected A:B, such as 0:200, got 'a:b'"),
        (["--seed", "x"], "expected a whole number from 0 on, got 'x'"),
        (["--jobs", "0"], "expected a number of processes from 1 to 256, got '0'"),
        (["--jobs", "many"], "expected a number of processes from 1 to 256, got 'many'"),
        (["--seed", "1", "--seeds", "1:2"], "not allowed with argument"),
        (["--sedes", "1:2"], "unrecognized arguments: --sedes"),
    ],
)
def test_bad_arguments(
    given: list[str], error: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if error is None:
        assert main(given) == 0
        return
    with pytest.raises(SystemExit) as exit_:
        main(given)
    assert exit_.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.slow
def test_processes_share_the_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:6", "--jobs", "2"]) == 0
    assert "6 seeds in" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_another_process_sees_the_same_history(hash_seed: str) -> None:
    script = "from turbopump.testing.simulate.run import simulate\n"
    script += f"for seed in {SEEDS}: print(simulate(seed).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [simulate(seed).digest for seed in SEEDS]


def test_seeds_cover_every_option() -> None:
    plans = [planned(seed) for seed in range(300)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(FaultKind)
    assert {group.kind for plan in plans for group in plan.groups} == set(GroupKind)
    sends = [send for plan in plans for sends in plan.producers.values() for send in sends]
    assert {send.mode for send in sends} == set(SendMode)
    assert {plan.is_sync for plan in plans} == {True, False}
    assert any(not plan.faults for plan in plans)
    assert planned(7) == planned(7)
    replicated = [plan for plan in plans if plan.replicas.slaves]
    assert 50 < len(replicated) < 100
    assert {plan.replicas.is_sync_master for plan in replicated} == {True, False}
    assert all(plan.settings["brokerRole"] for plan in replicated)
    with_transacting = [plan.transactions for plan in plans if plan.transactions.transacting]
    assert 70 < len(with_transacting) < 130
    deeds = [
        deed for each in with_transacting for deeds in each.transacting.values() for deed in deeds
    ]
    assert {deed.ending for deed in deeds} == set(Ending)


def test_slaves_change_nothing_else_that_a_seed_decides() -> None:
    for plan in map(planned, range(50)):
        others = [fault for fault in plan.faults if fault not in plan.replicas.faults]
        # Reads fail on any machine.
        assert all(
            fault.target not in plan.replicas.names or fault.kind is FaultKind.FAIL_READS
            for fault in others
        )
        assert not plan.replicas.faults or others
