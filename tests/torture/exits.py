"""Programs that exit without closing their clients: nothing is dropped silently."""

from __future__ import annotations

import re
import signal

from torture.accounts import Accounts
from torture.cluster import START_S, Broker, NameServer
from torture.leaver import WAITING
from torture.load import QUEUES
from torture.messages import WORK, identity_of
from torture.peer import ask as ask_plainly
from torture.reading import messages_of
from torture.scenario import Row, Scenario

COUNT = 3000
_MEMBERS_OF = 38
_EXIT_S = 60.0


def exit_without_close(scenario: Scenario) -> Row:
    """Exit producers and consumers in each way that programs exit."""
    nameserver = NameServer(scenario.processes).address
    broker = Broker(scenario.processes, scenario.directory / "broker", nameserver)
    broker.start()
    broker.create_topic(WORK, QUEUES)
    row, exits, signals = Row(scenario.name), 0, 0
    warned = 0
    while scenario.left_s > 0 or not exits:
        warned += _submitted(scenario, row, nameserver, exits)
        exits += 1
        for number in (signal.SIGTERM, signal.SIGINT):
            _signalled(scenario, row, broker, nameserver, number)
            signals += 1
    row.did = f"{exits} exits, {signals} signals"
    accounts = Accounts(scenario.directory)
    accounts.read()
    stored = _stored(broker)
    missing = accounts.tried.keys() - stored
    dropped = accounts.acknowledged.keys() - stored
    row.tried, row.acknowledged = len(accounts.tried), len(accounts.acknowledged)
    row.lost = len(dropped)
    row.notes.append(f"{len(missing)} dropped at exit, {warned} of them announced")
    row.expect(not dropped, f"{len(dropped)} acknowledged messages lost")
    row.expect(
        len(missing) <= warned,
        f"{len(missing)} submitted messages dropped with exit code 0, {warned} announced",
    )
    code = broker.stop()
    row.expect(code == 0, f"the broker exited with {code} after SIGTERM")
    return row


def _stored(broker: Broker) -> set[str]:
    return {
        identity_of(message.body)
        for queue_id in range(QUEUES)
        for message in messages_of(broker.address, WORK, queue_id)
    }


def _submitted(scenario: Scenario, row: Row, nameserver: str, number: int) -> int:
    """Submit and exit; return how many messages the program reported as dropped."""
    name = f"sender-exit{number}"
    journal = scenario.directory / f"{name}.journal"
    arguments = ["submit", nameserver, str(journal), f"e{number}", str(COUNT)]
    leaver = scenario.processes.python(name, "torture.leaver", arguments)
    code = leaver.wait(_EXIT_S)
    row.expect(code is not None, f"a producer did not end within {_EXIT_S:g} s")
    text = leaver.log_text()
    announced = re.search(r"(\d+) (?:submitted )?messages?\b", text)
    return int(announced[1]) if announced else 0


def _signalled(
    scenario: Scenario, row: Row, broker: Broker, nameserver: str, number: signal.Signals
) -> None:
    """Signal a waiting consumer; its group must be empty right after it exits."""
    leaver = scenario.processes.python("waiter", "torture.leaver", ["wait", nameserver])
    leaver.ready_line(START_S)
    leaver.signal(number)
    code = leaver.wait(_EXIT_S)
    row.expect(code == 0, f"a waiting consumer exited with {code} after {number.name}")
    answer, body = ask_plainly(broker.address, _MEMBERS_OF, {"consumerGroup": WAITING})
    is_member = answer["code"] == 0 and b"@" in body
    row.expect(not is_member, f"still in its group after {number.name}: {body[:200]!r}")
