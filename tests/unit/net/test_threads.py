"""Threads that may be left behind: what they run, and that no process waits for them."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading

import pytest

from turbopump.machine.threads import DaemonThreads, busy_threads

WAIT_S = 30.0


def test_jobs_run_concurrently_and_their_results_are_returned() -> None:
    both = threading.Barrier(2)
    threads = DaemonThreads(2, "side")
    jobs = [threads.submit(both.wait, WAIT_S) for _ in range(2)]
    assert sorted(job.result(WAIT_S) for job in jobs) == [0, 1]
    threads.shutdown()
    assert not [each for each in threading.enumerate() if each.name.startswith("side_")]


def test_idle_threads_are_reused_and_their_number_is_bounded() -> None:
    threads = DaemonThreads(1, "one")
    jobs = [threads.submit(lambda: threading.current_thread().name) for _ in range(20)]
    assert {job.result(WAIT_S) for job in jobs} == {"one_0"}
    threads.shutdown()


@pytest.mark.parametrize("chains", [1, 4])
def test_a_job_submitted_by_the_callback_of_another_needs_no_further_thread(chains: int) -> None:
    """The finishing thread is about to become free, and no idle one is lost from the count."""
    threads, lengths, lock = DaemonThreads(50, "chain"), [0] * chains, threading.Lock()
    finished = threading.Semaphore(0)
    together = threading.Barrier(chains, timeout=WAIT_S)

    def follow(chain: int, _: object) -> None:
        with lock:
            lengths[chain] += 1
        if lengths[chain] == 500:
            finished.release()
        else:
            threads.submit(int).add_done_callback(functools.partial(follow, chain))

    for chain in range(chains):
        threads.submit(together.wait).add_done_callback(functools.partial(follow, chain))
    assert all(finished.acquire(timeout=WAIT_S) for _ in range(chains))
    names = {each.name for each in threading.enumerate() if each.name.startswith("chain_")}
    assert names == {f"chain_{number}" for number in range(chains)}
    threads.shutdown()


def test_cancelled_and_failed_jobs_free_their_threads() -> None:
    threads, gate = DaemonThreads(50, "freed"), threading.Event()
    held = threads.submit(gate.wait, WAIT_S)
    waiting = [threads.submit(gate.wait, WAIT_S) for _ in range(3)]
    failing = threads.submit(lambda: 1 / 0)
    assert isinstance(failing.exception(WAIT_S), ZeroDivisionError)
    gate.set()
    assert all(each.result(WAIT_S) for each in (held, *waiting))
    for _ in range(20):
        assert isinstance(threads.submit(lambda: 1 / 0).exception(WAIT_S), ZeroDivisionError)
    assert sum(each.name.startswith("freed_") for each in threading.enumerate()) == 5
    threads.shutdown()


def test_existing_threads_do_the_work_when_the_system_allows_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads, gate = DaemonThreads(2, "scarce"), threading.Event()
    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            threads.submit(int, "1")
    first = threads.submit(gate.wait, WAIT_S)
    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", refuse)
        second = threads.submit(int, "2")
    gate.set()
    assert (first.result(WAIT_S), second.result(WAIT_S)) == (True, 2)
    threads.shutdown()


def test_errors_are_returned_too() -> None:
    threads = DaemonThreads(1, "failing")
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(WAIT_S)
    assert threads.submit(int, "7").result(WAIT_S) == 7
    threads.shutdown()


def test_jobs_that_have_not_started_can_be_cancelled() -> None:
    begun, release = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(WAIT_S)

    threads = DaemonThreads(1, "busy")
    running = threads.submit(work)
    assert begun.wait(WAIT_S)
    waiting, later = threads.submit(int), threads.submit(int)
    assert waiting.cancel()
    assert "busy_0" in busy_threads()
    threads.shutdown(wait=False, cancel_futures=True)
    assert later.cancelled()
    assert threads._threads[0].is_alive()
    release.set()
    threads._threads[0].join(WAIT_S)
    assert not threads._threads[0].is_alive()
    assert running.result(0) is None
    with pytest.raises(RuntimeError, match="thread pool busy is shut down"):
        threads.submit(int)


def test_waiting_jobs_run_before_the_threads_end() -> None:
    threads = DaemonThreads(3, "last")
    jobs = [threads.submit(int, str(number)) for number in range(50)]
    threads.shutdown()
    assert [job.result(0) for job in jobs] == list(range(50))


def test_a_job_that_never_returns_does_not_keep_the_process_alive() -> None:
    program = (
        "import threading; from turbopump.machine.threads import DaemonThreads;"
        "begun = threading.Event();"
        "work = lambda: (begun.set(), threading.Event().wait());"
        "DaemonThreads(1, 'stuck').submit(work); begun.wait(); print('end')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "end\n"
