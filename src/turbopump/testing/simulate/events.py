"""What happens in a run: facts with a time, which the checks judge and people read.

Times are microseconds of virtual time since the start of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from turbopump.message import MessageQueue

US_PER_S = 1_000_000
US_PER_MS = 1000


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    at_us: int

    @property
    def who(self) -> str:
        """The part of the cluster that it happened to."""
        return "run"


# --- sending --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendBegan(Event):
    """A producer begins to send a message, or one of a batch."""

    producer: str
    key: str
    topic: str
    delay_us: int = 0
    is_durable: bool = True
    """Whether an acknowledgement promises what the flush mode does; not for WAIT=false."""

    @property
    def who(self) -> str:
        return self.producer

    def __str__(self) -> str:
        delay = f", delayed by {self.delay_us / US_PER_S:g} s" if self.delay_us else ""
        return f"sends {self.key} to {self.topic}{delay}"


@dataclass(frozen=True, slots=True)
class SendTried(Event):
    """A request with a message leaves its producer."""

    producer: str
    key: str

    @property
    def who(self) -> str:
        return self.producer

    def __str__(self) -> str:
        return f"tries to send {self.key}"


@dataclass(frozen=True, slots=True)
class Acknowledged(Event):
    """A send succeeded."""

    producer: str
    key: str
    queue: MessageQueue
    offset: int
    machine: str = ""
    """Which machine of the broker's name has stored it; empty if there is one master only."""

    @property
    def who(self) -> str:
        return self.producer

    def __str__(self) -> str:
        return f"{self.key} acknowledged: {self.queue} offset {self.offset}"


@dataclass(frozen=True, slots=True)
class SendFailed(Event):
    """A send failed, or its outcome is not certain."""

    producer: str
    key: str
    reason: str

    @property
    def who(self) -> str:
        return self.producer

    def __str__(self) -> str:
        return f"{self.key} not acknowledged: {self.reason}"


@dataclass(frozen=True, slots=True)
class TransactionDecided(Event):
    """The local transaction of a message has committed or rolled back."""

    producer: str
    key: str
    commits: bool

    @property
    def who(self) -> str:
        return self.producer

    def __str__(self) -> str:
        return f"{'commits' if self.commits else 'rolls back'} {self.key}"


@dataclass(frozen=True, slots=True)
class TransactionsLeft(Event):
    """Transactions are open although every producer has decided: always a violation."""

    broker: str
    keys: tuple[str, ...]

    @property
    def who(self) -> str:
        return self.broker

    def __str__(self) -> str:
        return f"has open transactions: {', '.join(self.keys)}"


# --- consuming ------------------------------------------------------------------------------------


class Result(Enum):
    """How a listener's call ended for one message."""

    SUCCESS = "success"
    FAILURE = "failure"
    CUT = "cut off"
    """The process died, or the call was cancelled: whatever it did, no answer left it."""


@dataclass(frozen=True, slots=True)
class ConsumeBegan(Event):
    """A listener is called with a message."""

    group: str
    member: str
    queue: MessageQueue
    offset: int
    key: str
    times: int
    """How often the message was retried before."""
    call: int

    @property
    def who(self) -> str:
        return self.member

    def __str__(self) -> str:
        return f"gets {self.key} from {self.queue} offset {self.offset}, retry {self.times}"


@dataclass(frozen=True, slots=True)
class ConsumeEnded(Event):
    """A listener's call ended, or its process."""

    group: str
    member: str
    queue: MessageQueue
    offset: int
    key: str
    times: int
    call: int
    result: Result

    @property
    def who(self) -> str:
        return self.member

    def __str__(self) -> str:
        return f"{self.key} from {self.queue} offset {self.offset}: {self.result.value}"


@dataclass(frozen=True, slots=True)
class Joined(Event):
    """A member of a group has started."""

    group: str
    member: str

    @property
    def who(self) -> str:
        return self.member

    def __str__(self) -> str:
        return f"joins {self.group}"


@dataclass(frozen=True, slots=True)
class Left(Event):
    """A member begins to leave its group, or dies."""

    group: str
    member: str
    is_crash: bool

    @property
    def who(self) -> str:
        return self.member

    def __str__(self) -> str:
        return "crashes" if self.is_crash else f"leaves {self.group}"


@dataclass(frozen=True, slots=True)
class Assigned(Event):
    """The queues of a member have changed."""

    group: str
    member: str
    queues: tuple[MessageQueue, ...]

    @property
    def who(self) -> str:
        return self.member

    def __str__(self) -> str:
        return f"owns {', '.join(map(str, self.queues)) or 'no queue'}"


# --- brokers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """A message in a queue."""

    key: str | None
    """None when the body is not one that was ever sent."""
    times: int = 0
    record: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    """Where in the log and when it was stored: another one if it is stored again."""


@dataclass(frozen=True, slots=True)
class Readable(Event):
    """A message can be read from a queue."""

    queue: MessageQueue
    offset: int
    message: Stored

    @property
    def who(self) -> str:
        return self.queue.broker

    def __str__(self) -> str:
        message = self.message
        retry = f", retry {message.times}" if message.times else ""
        return f"{self.queue} offset {self.offset} is {message.key or 'damaged'}{retry}"


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """The committed offset of a group has changed."""

    group: str
    queue: MessageQueue
    offset: int
    before: int | None

    @property
    def who(self) -> str:
        return self.queue.broker

    def __str__(self) -> str:
        before = "nothing" if self.before is None else self.before
        return f"{self.group} committed {self.offset} in {self.queue}, before {before}"


class Down(Enum):
    """How a broker ended."""

    STOPPED = "stops"
    KILLED = "is killed"
    POWER_LOST = "loses power"


@dataclass(frozen=True, slots=True)
class BrokerDown(Event):
    """A broker no longer runs, or begins to stop."""

    broker: str
    how: Down

    @property
    def who(self) -> str:
        return self.broker

    def __str__(self) -> str:
        return self.how.value


@dataclass(frozen=True, slots=True)
class BrokerUp(Event):
    """A broker runs; what its store and its table of offsets hold then."""

    broker: str
    contents: Mapping[MessageQueue, tuple[int, tuple[Stored, ...]]]
    """By queue: the lowest offset, and the messages from there on."""
    committed: Mapping[tuple[str, MessageQueue], int]
    promoted: str = ""
    """The machine that has become master of this broker name, if it was another one before."""

    @property
    def who(self) -> str:
        return self.broker

    def __str__(self) -> str:
        count = sum(len(messages) for _, messages in self.contents.values())
        if self.promoted:
            return f"has {self.promoted} as its master now, with {count} messages"
        return f"has started with {count} messages in {len(self.contents)} queues"


@dataclass(frozen=True, slots=True)
class Reopened(Event):
    """A store was opened twice without anything in between: what differed."""

    broker: str
    differences: tuple[str, ...]

    @property
    def who(self) -> str:
        return self.broker

    def __str__(self) -> str:
        return f"opened twice: {'; '.join(self.differences) or 'the same'}"


# --- slaves ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replicated(Event):
    """A slave has stored a message of its master's queue."""

    replica: str
    queue: MessageQueue
    offset: int
    message: Stored

    @property
    def who(self) -> str:
        return self.replica

    def __str__(self) -> str:
        return f"has a copy of {self.message.key or 'damaged'} at {self.queue} offset {self.offset}"


@dataclass(frozen=True, slots=True)
class ReplicaHolds(Event):
    """A slave has started, or has cut its log: what it holds then, by its master's queues."""

    replica: str
    contents: Mapping[MessageQueue, tuple[int, tuple[Stored, ...]]]
    is_start: bool
    followed: str = ""
    """The machine with whose log it has compared its own; perhaps a master that was replaced."""

    @property
    def who(self) -> str:
        return self.replica

    def __str__(self) -> str:
        count = sum(len(messages) for _, messages in self.contents.values())
        cause = "has started with" if self.is_start else "has cut its log, and holds"
        return f"{cause} copies of {count} messages"


@dataclass(frozen=True, slots=True)
class LogsCompared(Event):
    """The log of a slave was compared with its master's."""

    replica: str
    difference: str
    """Empty if they are the same."""

    @property
    def who(self) -> str:
        return self.replica

    def __str__(self) -> str:
        return f"compared with the master: {self.difference or 'the same'}"


@dataclass(frozen=True, slots=True)
class StaleWrite(Event):
    """A machine that is not the master has written messages of its own."""

    machine: str
    must_know: str
    """Why it must know that it is not the master; empty if it may not have been notified."""

    @property
    def who(self) -> str:
        return self.machine

    def __str__(self) -> str:
        return f"writes although it was replaced: {self.must_know or 'it does not know yet'}"


# --- faults ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FaultBegan(Event):
    """Something is made to go wrong."""

    kind: str
    target: str
    text: str = ""

    @property
    def who(self) -> str:
        return "fault"

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.target, self.text)))


@dataclass(frozen=True, slots=True)
class FaultEnded(Event):
    """What was made to go wrong is repaired."""

    kind: str
    target: str

    @property
    def who(self) -> str:
        return "fault"

    def __str__(self) -> str:
        return f"{self.kind} {self.target} ends"


@dataclass(frozen=True, slots=True)
class ClockJumped(Event):
    """All wall clocks were set, or that of one machine."""

    by_us: int
    machine: str = ""

    @property
    def who(self) -> str:
        return "fault"

    def __str__(self) -> str:
        of = f" of {self.machine}" if self.machine else ""
        return f"clock{of} set by {self.by_us / US_PER_S:+g} s"


# --- name servers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyValueStored(Event):
    """A name server has acknowledged a value."""

    server: str
    key: str

    @property
    def who(self) -> str:
        return self.server

    def __str__(self) -> str:
        return f"has stored {self.key}"


@dataclass(frozen=True, slots=True)
class KeyValuesRead(Event):
    """What a name server has of the values that were stored."""

    server: str
    keys: tuple[str, ...]

    @property
    def who(self) -> str:
        return self.server

    def __str__(self) -> str:
        return f"has {', '.join(self.keys) or 'no values'}"


# --- the run --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Healed(Event):
    """No fault happens from now on, and all processes run."""

    def __str__(self) -> str:
        return "all faults are over"


@dataclass(frozen=True, slots=True)
class Calm(Event):
    """Everything is consumed; what is sent now must be delivered without delay."""

    def __str__(self) -> str:
        return "everything is consumed"


@dataclass(frozen=True, slots=True)
class Ended(Event):
    """The run is over and everything is closed."""

    def __str__(self) -> str:
        return "everything is closed"


@dataclass(frozen=True, slots=True)
class Unexpected(Event):
    """An unhandled error, or work left over: always a violation."""

    what: str

    def __str__(self) -> str:
        return self.what
