"""A stopped store is damaged and started: it serves what is intact, or reports what is wrong."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from brokers import Client
from torture.cluster import Broker
from torture.damages import Damaged, endless
from torture.messages import body_of, message_id
from torture.processes import NotReady, Processes
from torture.reading import ask
from torture.scenario import Row, Scenario
from torture.stores import (
    COMMITTED,
    QUEUES,
    SEGMENT_BYTES,
    SETTINGS,
    TOPIC,
    Stuck,
    committed,
    make_store,
    queue_messages,
    send,
)
from turbopump.errors import TurbopumpError
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.hashing import body_crc
from turbopump.wire.headers import QueryMessage
from turbopump.wire.record import MessageView

CASES_MIN = 3
_START_S = 30.0
_REPORTED = re.compile(r" (WARNING|ERROR|CRITICAL) ")
_FAR_FUTURE_MS = 2**53


def damaged(scenario: Scenario) -> Row:
    """Damage copies of two stores, one stopped and one killed, and start a broker on each."""
    row, outcomes = Row(scenario.name), Counter[str]()
    bases = {
        ending: make_store(
            scenario.processes, scenario.directory / ending, is_killed=ending == "killed"
        )
        for ending in ("stopped", "killed")
    }
    for ending in bases:
        code = _verified(scenario.processes, scenario.directory / ending / "store")
        row.expect(code == 0, f"store verify of an undamaged store ({ending}) exits with {code}")
    for damage in endless(scenario.chance):
        if scenario.left_s <= 0 and outcomes.total() >= CASES_MIN:
            break
        ending = scenario.chance.choice(tuple(bases))
        home = scenario.directory / f"case-{outcomes.total()}"
        shutil.copytree(scenario.directory / ending, home)
        case = Damaged(home / "store", bases[ending], SEGMENT_BYTES, scenario.chance)
        damage(case)
        name = damage.__name__.replace("_", " ")
        scenario.say(name)
        trial = Trial(scenario.processes, case)
        outcomes[trial.run()] += 1
        row.tried += len(case.messages)
        row.acknowledged += len(case.messages)
        row.lost += trial.lost
        for finding in trial.findings:
            row.expect(False, f"{name} ({ending}; {case.what}; {home.name}): {finding}")
        if not trial.findings:
            shutil.rmtree(home)
    counted = ", ".join(f"{count} {each}" for each, count in sorted(outcomes.items()))
    row.did = f"{outcomes.total()} damages: {counted}"
    return row


def _verified(processes: Processes, store: Path) -> int | None:
    """Return the exit code of ``turbopump store verify``: 0 if it finds no damage, 1 if it does."""
    return processes.turbopump("verify", "store", "verify", str(store)).wait(_START_S)


@dataclass
class Trial:
    """One damaged store, and a broker started on it."""

    processes: Processes
    case: Damaged
    lost: int = 0

    def __post_init__(self) -> None:
        self.findings: list[str] = []
        self._must_report_missing = True
        self._verify_code: int | None = None
        self.broker = Broker(self.processes, self.case.store.parent, settings=SETTINGS)

    def run(self) -> str:
        """Run the trial; return its outcome as one word."""
        outcome = "served"
        self._verify_code = _verified(self.processes, self.case.store)
        self._expect(self._verify_code in (0, 1, 2), f"store verify exits with {self._verify_code}")
        if self.case.only_verify_notices:
            self._expect(self._verify_code == 1, "store verify finds nothing")
            shutil.rmtree(self.case.store / "consumequeue")
        try:
            self.broker.start(_START_S)
        except NotReady as error:
            self._judge_refusal(error)
            if not self._is_repaired():
                return "refused"
            outcome = "repaired"
            # The refusal has already reported what is missing.
            self.case.must_report = self._must_report_missing = False
        try:
            ask(self.broker.address, self._judge_service, wait_s=30.0)
        except (Stuck, TurbopumpError, TimeoutError, ValueError) as error:
            self.findings.append(f"{type(error).__name__}: {error}")
        code = self.broker.stop()
        self._expect(code == 0, f"the broker exited with {code} after SIGTERM")
        self._expect("Traceback" not in self.broker.log_text(), "traceback in the log")
        return outcome

    def _is_repaired(self) -> bool:
        """Repair the store as documented; return whether the broker runs afterwards."""
        options = ["--yes", "--segment-bytes", str(self.case.segment_bytes)]
        process = self.processes.turbopump(
            f"repair-{self.broker.directory.name}",
            *("store", "repair", str(self.case.store), *options),
        )
        code = process.wait(_START_S)
        self._expect(code is not None, "store repair does not end")
        self._expect("Traceback" not in process.log_text(), "traceback of store repair")
        if code != 0:
            return False
        try:
            self.broker.start(_START_S)
        except NotReady as error:
            self._expect("commitlog" not in error.text, f"after repair: {error.text[-300:]}")
            return False
        return True

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.findings.append(otherwise)

    def _judge_refusal(self, error: NotReady) -> None:
        text = error.text.strip()
        self._expect(self.case.may_refuse, f"did not start: {text[-300:]}")
        self._expect(error.returncode is not None, "neither ready nor ended")
        self._expect("Traceback" not in text, f"traceback: {text[-600:]}")
        named = any(name in text for name in self.case.names)
        self._expect(named, f"the error names none of {sorted(self.case.names)}: {text[-300:]}")

    async def _judge_service(self, client: Client) -> None:
        found: dict[tuple[str, int, int], MessageView] = {
            (TOPIC, queue_id, message.queue_offset): message
            for queue_id in range(QUEUES)
            for message in await queue_messages(client, queue_id)
        }
        missing = self._judge_messages(found)
        await self._judge_offsets(client)
        await self._judge_index(client)
        await self._judge_new_messages(client)
        reported = _REPORTED.search(self.broker.log_text()) is not None
        # Damage that no checksum covers cannot be detected, and loses no message.
        unseen = missing and self._verify_code == 0
        self._expect(not unseen, f"store verify does not find {missing} damaged messages")
        must_report = self.case.must_report or (missing and self._must_report_missing)
        silent = must_report and not reported
        self._expect(not silent, f"no word in the log, {missing} messages are missing")

    def _judge_messages(self, found: dict[tuple[str, int, int], MessageView]) -> int:
        """Check all messages; return how many of the damaged ones are not served."""
        missing = 0
        for stored in self.case.messages:
            place = (stored.topic, stored.queue_id, stored.offset)
            message = found.get(place)
            is_harmed = place in self.case.harmed
            if message is None:
                missing += is_harmed
                self.lost += not is_harmed
            elif not is_harmed:
                self.lost += message.body != stored.body
            elif body_crc(message.stored_body) == message.body_crc:
                # What no checksum covers may differ; the body must not.
                self._expect(message.body == stored.body, f"another body at {place}")
        self._expect(not self.lost, f"{self.lost} undamaged messages are not served")
        return missing

    async def _judge_offsets(self, client: Client) -> None:
        offsets = [await committed(client, queue_id) for queue_id in range(QUEUES)]
        unchanged = offsets == [COMMITTED] * QUEUES
        self._expect(
            unchanged or self.case.offsets_may_change,
            f"committed offsets {offsets}, expected {COMMITTED}",
        )

    async def _judge_index(self, client: Client) -> None:
        """Look up some messages by key: found or not, but never an error."""
        for stored in self.case.chance.sample(list(self.case.messages), 3):
            key = stored.body.partition(b"|")[0].decode()
            header = QueryMessage(
                topic=TOPIC, key=key, max_num=8, begin_timestamp=0, end_timestamp=_FAR_FUTURE_MS
            )
            answer = await client.ask(RequestCode.QUERY_MESSAGE, header)
            expected = (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)
            self._expect(answer.code in expected, f"look-up by key: {answer.code} {answer.remark}")

    async def _judge_new_messages(self, client: Client) -> None:
        """Send to each queue; the broker may reject messages, but must serve those it accepts."""
        sent: dict[int, bytes] = {}
        for queue_id in range(QUEUES):
            identity = message_id(TOPIC, "new", queue_id)
            answer = await send(client, identity, queue_id)
            if answer.code == ResponseCode.SUCCESS:
                sent[queue_id] = body_of(identity)
        self._expect(bool(sent), "no new message is accepted")
        for queue_id, body in sent.items():
            bodies = _bodies(await queue_messages(client, queue_id))
            self._expect(body in bodies, f"a new message is not served by queue {queue_id}")


def _bodies(messages: Iterable[MessageView]) -> set[bytes]:
    return {
        message.body for message in messages if body_crc(message.stored_body) == message.body_crc
    }
