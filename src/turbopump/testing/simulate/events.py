"""What happens in a run: facts with a time, which the checks judge and users read.

Times are microseconds of virtual time since the start of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import asdict

from turbopump.message import MessageQueue

US_PER_S = 1_000_000
US_PER_MS = 1000
DAMAGED = "damaged"
"""In place of the key of a message, if its body was never sent."""


class Event(Struct, frozen=True):
    """Something that happened."""

    at_us: int

    subject: ClassVar[str] = ""
    """The attribute that names the part of the cluster to which it happened."""

    @property
    def who(self) -> str:
        """The part of the cluster to which it happened."""
        return str(attrgetter(self.subject)(self)) if self.subject else "run"


# --- sending --------------------------------------------------------------------------------------


class OfProducer(Event, frozen=True):
    """Something that happened to a message of a producer."""

    subject = "producer"
    producer: str
    key: str


class SendBegan(OfProducer, frozen=True):
    """A producer begins to send a message, or one of a batch."""

    topic: str
    delay_us: int = 0
    is_durable: bool = True
    """Whether an acknowledgement guarantees what the flush mode does; not for WAIT=false."""
    in_burst: bool = False
    """Whether others are sent at the same time, in any order."""

    def __str__(self) -> str:
        delay = f", delayed by {self.delay_us / US_PER_S:g} s" if self.delay_us else ""
        burst = ", with others at the same time" if self.in_burst else ""
        return f"sends {self.key} to {self.topic}{delay}{burst}"


class SendTried(OfProducer, frozen=True):
    """A request with a message leaves its producer."""

    def __str__(self) -> str:
        return f"tries to send {self.key}"


class Acknowledged(OfProducer, frozen=True):
    """A send succeeded."""

    queue: MessageQueue
    offset: int
    machine: str = ""
    """Which machine of the broker's name has stored it; empty if there is only one master."""

    def __str__(self) -> str:
        return f"{self.key} acknowledged: {self.queue} offset {self.offset}"


class SendFailed(OfProducer, frozen=True):
    """A send failed, or its outcome is unknown."""

    reason: str

    def __str__(self) -> str:
        return f"{self.key} not acknowledged: {self.reason}"


class TransactionDecided(OfProducer, frozen=True):
    """The local transaction of a message has committed or rolled back."""

    commits: bool

    def __str__(self) -> str:
        return f"{'commits' if self.commits else 'rolls back'} {self.key}"


# --- consuming ------------------------------------------------------------------------------------


class Result(Enum):
    """How a listener's call ended for one message."""

    SUCCESS = "success"
    FAILURE = "failure"
    CUT = "cut off"
    """The process died, or the call was cancelled: whatever it did, no response was sent."""


class OfMember(Event, frozen=True):
    """Something that happened to a member of a consumer group."""

    subject = "member"
    group: str
    member: str


class Consuming(OfMember, frozen=True):
    """The start or end of a listener's call with a message."""

    queue: MessageQueue
    offset: int
    key: str
    times: int
    """The number of earlier retries."""
    call: int


class ConsumeBegan(Consuming, frozen=True):
    """A listener is called with a message."""

    def __str__(self) -> str:
        return f"gets {self.key} from {self.queue} offset {self.offset}, retry {self.times}"

    def ended(self, at_us: int, result: Result) -> ConsumeEnded:
        """Return the end of the same call."""
        return ConsumeEnded(**(asdict(self) | {"at_us": at_us, "result": result}))


class ConsumeEnded(Consuming, frozen=True):
    """A listener's call ended, or its process."""

    result: Result

    def __str__(self) -> str:
        return f"{self.key} from {self.queue} offset {self.offset}: {self.result.value}"


class Joined(OfMember, frozen=True):
    """A member of a group has started."""

    def __str__(self) -> str:
        return f"joins {self.group}"


class Left(OfMember, frozen=True):
    """A member begins to leave its group, or dies."""

    is_crash: bool

    def __str__(self) -> str:
        return "crashes" if self.is_crash else f"leaves {self.group}"


class Assigned(OfMember, frozen=True):
    """The queues of a member have changed."""

    queues: tuple[MessageQueue, ...]

    def __str__(self) -> str:
        return f"owns {', '.join(map(str, self.queues)) or 'no queue'}"


# --- brokers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """A message in a queue."""

    key: str | None
    """None if the body was never sent."""
    times: int = 0
    record: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    """Where in the log and when it was stored: different if it is stored again."""
    is_damaged: bool = field(default=False, compare=False)
    """Whether its body has the bits that a fault has flipped in it, or in another copy."""


class Readable(Event, frozen=True):
    """A message can be read from a queue."""

    subject = "queue.broker"
    queue: MessageQueue
    offset: int
    message: Stored

    def __str__(self) -> str:
        message = self.message
        retry = f", retry {message.times}" if message.times else ""
        return f"{self.queue} offset {self.offset} is {message.key or DAMAGED}{retry}"


class Committed(Event, frozen=True):
    """The committed offset of a group has changed."""

    subject = "queue.broker"
    group: str
    queue: MessageQueue
    offset: int
    before: int | None

    def __str__(self) -> str:
        before = "nothing" if self.before is None else self.before
        return f"{self.group} committed {self.offset} in {self.queue}, before {before}"


class Down(Enum):
    """How a broker ended."""

    STOPPED = "stops"
    KILLED = "is killed"
    POWER_LOST = "loses power"


class OfBroker(Event, frozen=True):
    """Something that happened to a broker."""

    subject = "broker"
    broker: str


class BrokerDown(OfBroker, frozen=True):
    """A broker no longer runs, or begins to stop."""

    how: Down

    def __str__(self) -> str:
        return self.how.value


class BrokerUp(OfBroker, frozen=True):
    """A broker runs; what its store and its table of offsets hold then."""

    contents: Mapping[MessageQueue, tuple[int, tuple[Stored, ...]]]
    """By queue: the lowest offset, and the messages from there on."""
    committed: Mapping[tuple[str, MessageQueue], int]
    promoted: str = ""
    """The machine that has become master of this broker name, if it was another one before."""

    def __str__(self) -> str:
        count = sum(len(messages) for _, messages in self.contents.values())
        if self.promoted:
            return f"has {self.promoted} as its master now, with {count} messages"
        return f"has started with {count} messages in {len(self.contents)} queues"


class Reopened(OfBroker, frozen=True):
    """A store was opened twice without anything in between: what differed."""

    differences: tuple[str, ...]

    def __str__(self) -> str:
        return f"opened twice: {'; '.join(self.differences) or 'the same'}"


class TransactionsLeft(OfBroker, frozen=True):
    """Transactions have no operation although every producer has decided."""

    keys: tuple[str, ...]
    passed: tuple[str, ...] = ()
    """Those before the broker's progress: committed ones need no operation any more."""

    def __str__(self) -> str:
        return f"has open transactions: {', '.join((*self.keys, *self.passed))}"


# --- slaves ---------------------------------------------------------------------------------------


class OfReplica(Event, frozen=True):
    """Something that happened to a slave."""

    subject = "replica"
    replica: str


class Replicated(OfReplica, frozen=True):
    """A slave has stored a message of its master's queue."""

    queue: MessageQueue
    offset: int
    message: Stored

    def __str__(self) -> str:
        return f"has a copy of {self.message.key or DAMAGED} at {self.queue} offset {self.offset}"


class ReplicaHolds(OfReplica, frozen=True):
    """A slave has started, or has truncated its log: what it holds then, by its master's queues."""

    contents: Mapping[MessageQueue, tuple[int, tuple[Stored, ...]]]
    is_start: bool
    followed: str = ""
    """The machine with whose log it has compared its own; perhaps a replaced master."""

    def __str__(self) -> str:
        count = sum(len(messages) for _, messages in self.contents.values())
        cause = "has started with" if self.is_start else "has cut its log, and holds"
        return f"{cause} copies of {count} messages"


class LogsCompared(OfReplica, frozen=True):
    """The log of a slave was compared with its master's."""

    difference: str
    """Empty if they are the same."""

    def __str__(self) -> str:
        return f"compared with the master: {self.difference or 'the same'}"


class StaleWrite(Event, frozen=True):
    """A machine that is not the master has written messages of its own."""

    subject = "machine"
    machine: str
    must_know: str
    """Why it must know that it is not the master; empty if it may not have been notified."""
    keys: tuple[str, ...] = ()
    """Of the messages."""

    def __str__(self) -> str:
        return f"writes although it was replaced: {self.must_know or 'it does not know yet'}"


class Contested(Event, frozen=True):
    """Mastership went to a machine, or away from one, without the votes for it."""

    subject = "machine"
    machine: str
    how: str

    def __str__(self) -> str:
        return self.how


# --- faults ---------------------------------------------------------------------------------------


class OfFault(Event, frozen=True):
    """Something that a fault did."""

    @property
    def who(self) -> str:
        return "fault"


class FaultBegan(OfFault, frozen=True):
    """A fault starts."""

    kind: str
    target: str
    text: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.target, self.text)))


class FaultEnded(OfFault, frozen=True):
    """A fault is repaired."""

    kind: str
    target: str

    def __str__(self) -> str:
        return f"{self.kind} {self.target} ends"


class BitFlipped(OfFault, frozen=True):
    """A bit of a file of a broker was flipped."""

    broker: str
    file: str
    at: int
    queue: MessageQueue | None = None
    """Of the message whose body this damages, if it is one."""
    offset: int = 0
    key: str = ""
    topic: str = ""
    """The target of the message, if it was delayed; otherwise that of its queue."""
    committed: Mapping[tuple[str, MessageQueue], int] | None = None
    """The content of the backup, for a table of offsets."""

    def __str__(self) -> str:
        what = f", in {self.key} of {self.queue} offset {self.offset}" if self.queue else ""
        return f"flips a bit at {self.at} of {self.file} of {self.broker}{what}"


class ClockJumped(OfFault, frozen=True):
    """All wall clocks were set, or that of one machine."""

    by_us: int
    machine: str = ""

    def __str__(self) -> str:
        of = f" of {self.machine}" if self.machine else ""
        return f"clock{of} set by {self.by_us / US_PER_S:+g} s"


# --- name servers ---------------------------------------------------------------------------------


class KeyValueStored(Event, frozen=True):
    """A name server has acknowledged a value."""

    subject = "server"
    server: str
    key: str

    def __str__(self) -> str:
        return f"has stored {self.key}"


class KeyValuesRead(Event, frozen=True):
    """What a name server has of the values that were stored."""

    subject = "server"
    server: str
    keys: tuple[str, ...]

    def __str__(self) -> str:
        return f"has {', '.join(self.keys) or 'no values'}"


# --- the run --------------------------------------------------------------------------------------


class Healed(Event, frozen=True):
    """No fault happens from now on, and all processes run."""

    def __str__(self) -> str:
        return "all faults are over"


class Calm(Event, frozen=True):
    """Everything is consumed; what is sent now must be delivered without delay."""

    def __str__(self) -> str:
        return "everything is consumed"


class Ended(Event, frozen=True):
    """The run is over and everything is closed."""

    def __str__(self) -> str:
        return "everything is closed"


class Unexpected(Event, frozen=True):
    """An unhandled error, or work left over: always a violation."""

    what: str

    def __str__(self) -> str:
        return self.what
