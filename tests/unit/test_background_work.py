"""All background work belongs to a supervisor, is watched, or is awaited by its starter."""

from __future__ import annotations

from imports import calls, mentioning, name_of

STARTS = (
    "create_task",
    "ensure_future",
    "threading.Thread",
    "threading.Timer",
    "Thread",
    "start_thread",
    "call_later",
    "call_at",
    "run_in_executor",
    "DaemonThreads",
    "ThreadPoolExecutor",
)

OWNERS = {
    "supervisor.py": "the supervisor itself",
    "net/router.py": "one task for each request: owned by the connection, errors are answered",
    "net/deadlines.py": "timeouts: set again even if one of the calls that are due fails",
    "net/pool.py": "dialling: whoever asks for the connection waits for it",
    "machine/process.py": "starts threads for those below",
    "machine/background.py": "the machine's workers: errors reach whoever waits for the job",
    "machine/timers.py": "a timeout: ends with the wait",
    "machine/threads.py": "threads of an executor: errors reach whoever waits for the job",
    "broker/delays.py": "delay levels: watched, and scheduled again after a failure",
    "broker/queueing_delay.py": "measures while requests arrive: each sets a missing timer",
    "broker/replication/master.py": "heartbeats: watched; pauses of sends to a slave: one call",
    "broker/replication/slave.py": "heartbeats: watched",
    "broker/store_ticker.py": "ticks of the store: watched",
    "broker/transactions/transactions.py": "operations that were refused: watched",
    "bench/produce.py": "producers' threads: awaited before the result is printed",
    "client/background.py": "the event loop of blocking clients, and the calls that wait for it",
    "client/blocking.py": "closes a client that was not closed, at the end of the process",
    "client/offset_store.py": "calls of the application's store: awaited by the commit",
    "client/push_consumer.py": "closing: whoever closes waits for it",
    "client/worker.py": "functions: their caller waits for them; closing: as does that of close",
    "cli/worker_process.py": "the ends of workers and processes: awaited by their starter",
    "filter_server/sandbox.py": "batches: awaited by the pull, and over when the process ends",
    "client/delivery/workers.py": "calls of listeners: watched; a check while calls wait",
    "client/concurrent_calls.py": "requests to several brokers: awaited together",
    "client/inspection.py": "a call of the listener: awaited by the request",
    "client/rebalance.py": "wakes work that belongs to the supervisor",
    "client/session.py": "wakes work that belongs to the supervisor",
    "spark/pipelines/send_progress.py": "the display of progress: watched",
    "spark/reading/arrival_wait.py": "requests to several queues: awaited together",
    "spark/reading/retrying_pull.py": "reads ahead: awaited in order by the same reader",
    "spark/writing/retrying_sender.py": "sends: awaited before the task of Spark ends",
    "testing/": "runs whatever tests ask for",
}


def starts() -> dict[str, list[int]]:
    """Return where tasks, threads and timers start, other than in a group that waits for them."""
    found: dict[str, list[int]] = {}
    for path in mentioning(STARTS):
        for called, line in calls(path):
            owner, _, last = called.rpartition(".")
            if (last in STARTS or called in STARTS) and owner not in {"group", "tasks"}:
                found.setdefault(name_of(path), []).append(line)
    return found


def test_only_owners_start_tasks_threads_and_timers() -> None:
    others = {
        name: lines
        for name, lines in starts().items()
        if name not in OWNERS and not name.startswith("testing/")
    }
    assert not others, "use a Supervisor, or a TaskGroup"


def test_no_owner_is_listed_without_need() -> None:
    unused = OWNERS.keys() - starts().keys() - {"testing/"}
    assert not unused
