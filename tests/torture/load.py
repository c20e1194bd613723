"""A cluster under load: senders, members of three groups, and the invariants checked at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from torture.accounts import Accounts
from torture.cluster import START_S, Broker, NameServer
from torture.messages import FLOWS, WORK, Fate, fate_of
from torture.processes import Process
from torture.reading import UNREADABLE, dead_letters
from torture.scenario import Row, Scenario

MEMBERS = 3
RATE = 150.0
"""Messages per second of one sender."""

QUEUES = 5
"""Queues per topic; not a multiple of the number of members, so that shares differ."""

JOIN_S = 1.5
STUCK_S = 100.0
"""Without any progress for this long, what is missing is lost. The lock of a member that died lasts
60 s, and the next rebalance comes up to 20 s later."""

SETTLE_S = 3.0
"""Longer than the retry delays, so that surplus deliveries happen within it."""

_POLL_S = 0.1
_RSS_GROWTH_MAX = 200 * 1024 * 1024
_THREADS_MAX = 64
_FILES_MAX = 1000


@dataclass(frozen=True, slots=True)
class Allowed:
    """How many duplicates a disruption may cause; delivery is at-least-once."""

    redelivered: int
    copies: int
    """Dead letters beyond one for each failing message."""
    returns: int = 0
    """Ordered queues that two members may briefly own."""

    def __mul__(self, times: int) -> Allowed:
        return Allowed(self.redelivered * times, self.copies * times, self.returns * times)


NOTHING = Allowed(0, 0)


class Load:
    """Everything that runs during the disruptions."""

    def __init__(
        self,
        scenario: Scenario,
        settings: Mapping[str, str] | None = None,
        module: str = "turbopump",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.scenario = scenario
        self.logs_tracebacks = False
        """Whether the broker's log may contain tracebacks, as the disruptions make writes fail."""
        self.accounts = Accounts(scenario.directory)
        self.members: list[Process] = []
        self.senders: list[Process] = []
        self.peak_rss = 0
        self.peak_threads = 0
        self.peak_files = 0
        self.member_threads = 0
        self._count = 0
        self._first_rss: dict[int, int] = {}
        self.nameserver = NameServer(scenario.processes)
        home = scenario.directory / "broker"
        self.broker = Broker(
            scenario.processes, home, self.nameserver.address, settings, module, env
        )

    def start(self) -> None:
        """Start the broker, the members and a sender; wait until messages flow."""
        self.broker.start()
        for topic in FLOWS:
            self.broker.create_topic(topic, QUEUES)
        self.members += [self._worker("member", each) for each in ("threads", "async", "async")]
        for member in self.members:
            member.ready_line(START_S)
        # Members that join under load may briefly share a queue; there is no load yet.
        self.pause(JOIN_S)
        self.senders.append(self._worker("sender", f"s{self._count}", str(RATE)))
        self.senders[0].ready_line(START_S)
        self.wait_for_progress()

    def member(self, listeners: str = "async") -> Process:
        """Start one more member of all groups, and wait until it has joined."""
        process = self._worker("member", listeners)
        process.ready_line(START_S)
        return process

    def _worker(self, role: str, *arguments: str) -> Process:
        name = f"{role}-{self._count}"
        self._count += 1
        journal = self.scenario.directory / f"{name}.journal"
        arguments = (self.nameserver.address, str(journal), *arguments)
        return self.scenario.processes.python(name, f"torture.{role}", arguments)

    # --- waiting ----------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """Sleep, sampling the resource usage of the processes."""
        end = time.monotonic() + seconds
        while True:
            self._sample()
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.25))

    def wait_for_progress(self, wait_s: float = START_S) -> bool:
        """Wait until a message is acknowledged and one is consumed; return False on timeout."""
        self.accounts.read()
        acknowledged, calls = len(self.accounts.acknowledged), len(self.accounts.calls)
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            self.pause(_POLL_S)
            self.accounts.read()
            if len(self.accounts.acknowledged) > acknowledged and len(self.accounts.calls) > calls:
                return True
        return False

    def _sample(self) -> None:
        for server in (self.broker.process, self.nameserver.process):
            usage = server.usage()
            if usage is not None:
                first = self._first_rss.setdefault(server.pid, usage.rss_bytes)
                self.peak_rss = max(self.peak_rss, usage.rss_bytes - first)
                self.peak_threads = max(self.peak_threads, usage.threads)
                self.peak_files = max(self.peak_files, usage.files)
        for member in self.members:
            used = member.usage()
            if used is not None:
                self.member_threads = max(self.member_threads, used.threads)

    # --- the end ----------------------------------------------------------------------------------

    def finish(self, row: Row, *, allowed: Allowed) -> Row:
        """Stop sending, wait until everything is consumed, and compare."""
        for sender in self.senders:
            row.expect(sender.terminate() == 0, f"{sender.name} did not end: {sender.log_text()}")
        dead = self._drained()
        self.pause(SETTLE_S)
        try:
            dead = dead_letters(self.broker.address, WORK)
        except UNREADABLE as error:
            row.expect(False, f"dead letters cannot be read: {type(error).__name__}: {error}")
        self.accounts.read()
        for member in self.members:
            code = member.terminate()
            row.expect(code == 0, f"{member.name} exited with {code}: {member.log_text()[-500:]}")
        code = self.broker.stop()
        row.expect(code == 0, f"the broker exited with {code} after SIGTERM")
        self._judge(row, dead, allowed)
        return row

    def _drained(self) -> Counter[str]:
        """Wait until nothing is missing, or progress stops; return the dead letters."""
        dead: Counter[str] = Counter()
        before, since = -1, time.monotonic()
        while True:
            self.accounts.read()
            missing = self.accounts.missing(dead)
            if any(fate_of(each) is Fate.FAILS_ALWAYS for each in missing):
                with suppress(*UNREADABLE):
                    dead = dead_letters(self.broker.address, WORK)
                missing = self.accounts.missing(dead)
            if not missing:
                return dead
            if len(missing) != before:
                before, since = len(missing), time.monotonic()
                self.scenario.say(f"{len(missing)} messages are still in flight")
            if time.monotonic() - since > STUCK_S:
                return dead
            self.pause(_POLL_S)

    def _judge(self, row: Row, dead: Counter[str], allowed: Allowed) -> None:
        accounts = self.accounts
        missing = accounts.missing(dead)
        must_die = accounts.must_die()
        may_die = {each for each in accounts.tried if fate_of(each) is Fate.FAILS_ALWAYS}
        row.tried += len(accounts.tried)
        row.acknowledged += len(accounts.acknowledged)
        row.lost += len(missing)
        row.duplicated += accounts.redelivered()
        row.dead += dead.total()
        row.dead_expected += len(must_die | (may_die & dead.keys()))
        row.expect(bool(accounts.acknowledged), "nothing was acknowledged")
        row.expect(not missing, f"{len(missing)} acknowledged messages lost: {missing[:5]}")
        row.expect(not accounts.damaged, f"altered bodies: {sorted(accounts.damaged)[:5]}")
        wrong = dead.keys() - may_die
        row.expect(not wrong, f"{len(wrong)} dead letters that did not fail: {sorted(wrong)[:5]}")
        doubled = dead.total() - len(dead)
        row.expect(
            doubled <= allowed.copies,
            f"{dead.total()} dead letters of {len(dead)} failing messages, "
            f"at most {allowed.copies} more were expected",
        )
        row.expect(
            row.duplicated <= allowed.redelivered,
            f"{row.duplicated} redeliveries, at most {allowed.redelivered} were expected",
        )
        returns = accounts.returns()
        row.expect(
            len(returns) <= allowed.returns,
            f"{len(returns)} ordered queues with two owners in turn: {returns[:3]}",
        )
        for what, found in (
            ("overlapping calls of orderly listeners", accounts.overlaps()),
            ("messages out of order", accounts.out_of_order()),
            ("delayed messages early", accounts.early()),
        ):
            row.expect(not found, f"{len(found)} {what}: {found[:3]}")
        self._judge_usage(row)

    def _judge_usage(self, row: Row) -> None:
        text = self.broker.log_text()
        clean = self.logs_tracebacks or "Traceback" not in text
        row.expect(clean, f"traceback in the broker's log: {_first(text)}")
        grown = self.peak_rss // 2**20
        row.notes.append(f"slowest ack {self.accounts.slowest_ack_ms():.0f} ms")
        row.notes.append(f"memory +{grown} MiB")
        row.expect(self.peak_rss <= _RSS_GROWTH_MAX, f"a server's memory grew by {grown} MiB")
        row.expect(self.peak_threads <= _THREADS_MAX, f"a server has {self.peak_threads} threads")
        row.expect(self.peak_files <= _FILES_MAX, f"a server has {self.peak_files} open files")
        row.expect(
            self.member_threads <= _THREADS_MAX, f"a member has {self.member_threads} threads"
        )
        busy = [text for text in self.accounts.errors.values() if "TIMEOUT_CLEAN" in text]
        row.expect(not busy, f"{len(busy)} sends refused as busy: {busy[:1]}")
        refused = len(self.accounts.errors)
        if refused:
            row.notes.append(f"{refused} sends failed")


def _first(text: str) -> str:
    return text[text.find("Traceback") :][:600]
