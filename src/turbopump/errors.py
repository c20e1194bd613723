"""Every exception that Turbopump raises, in one tree.

::

    TurbopumpError
    ├── InvalidArgument            a value given by the caller is not allowed (also a ValueError)
    │   └── InvalidExpression      a filter expression cannot be compiled; knows the position
    ├── InvalidBody                a message's body is not of a type (also a ValueError)
    ├── WireError                  bytes that are not what the protocol says; knows the position
    │   ├── FrameError             a length is wrong: the stream cannot be followed further
    │   ├── HeaderError            a frame's header is not readable, or a field is missing or wrong
    │   ├── BodyError              a body is not of the kind its request or answer calls for
    │   └── RecordError            a stored message is damaged
    │       └── DamagedMessage     one that was pulled; knows the queue, its offset and the next
    ├── NetworkError               talking to a peer failed; ``retriable``
    │   ├── ListenFailed           the address to listen at is taken or not this machine's
    │   ├── ConnectFailed          no answer at the address, or a back-off pause
    │   │   └── NoNameServer       none of the name servers answered
    │   ├── ConnectionLost         the connection closed before the answer came
    │   ├── RequestTimeout         no answer in time
    │   └── Overloaded             this side has too much in flight or unwritten
    ├── StoreError                 the store cannot do what was asked
    │   ├── StoreClosed            it is not open
    │   ├── StoreInUse             another process, or this one, has the directory open already
    │   ├── StoreDamaged           files that no crash explains; opening them would lose more
    │   ├── DiskFailed             files could not be read or deleted; ``retriable``
    │   └── WriteRefused           nothing was stored, nothing is acknowledged; ``retriable``
    │       ├── DiskFull           no space is left, or more is used than the configured ratio
    │       └── WriteFailed        a write or flush failed, and is not repaired yet
    ├── ServerFailed               a server can no longer keep its guarantees, and has closed
    ├── ClientError                a client cannot be used as it was
    │   ├── NotRunning             it is not started, or closed already
    │   ├── ForkedClient           it was created in the parent process; create one here
    │   ├── MissingPackage         an optional package is not installed (also an ImportError)
    │   └── AdministrationError    an operation cannot be carried out
    │       ├── NoBroker           name servers know no broker at all; ``retriable``
    │       ├── NotThere           no such cluster, broker, topic, group or message
    │       ├── AlreadyThere       it already exists
    │       └── StillInUse         a group has members; stop them first
    ├── SparkError                 the Spark pipeline cannot continue
    │   ├── JavaNotFound           there is no Java that runs Spark, or it is too old
    │   ├── DataLost               messages that were to be read are gone from the broker
    │   └── GroupInUse             others consume with the group that a query wants for itself
    ├── TransactionNotStarted      the half message is not safe; nothing was executed; ``retriable``
    ├── NoRoute                    no known route to the topic or broker; ``retriable``
    └── RemoteError                the peer answered with an error code; knows it, and the remark
"""

from __future__ import annotations

from typing import Any


class TurbopumpError(Exception):
    """The root of everything raised on purpose.

    ::

        try:
            producer.send(message)
        except TurbopumpError as error:
            if not error.retriable:
                raise
    """

    retriable: bool = False
    """Whether retrying the same call may succeed."""


class InvalidArgument(TurbopumpError, ValueError):
    """An invalid argument; the text says which, what was expected and what was found."""


class InvalidExpression(InvalidArgument):
    """A filter expression cannot be compiled; ``position`` counts characters from its start."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason, position)
        self.reason = reason
        self.position = position

    def __str__(self) -> str:
        return f"{self.reason} (at character {self.position + 1})"


class InvalidBody(TurbopumpError, ValueError):
    """The body of a message is not what was asked for; the text names the message and the fault."""


class WireError(TurbopumpError):
    """Bytes that are not what the protocol says; ``position`` counts from their start."""

    def __init__(self, reason: str, position: int = 0) -> None:
        super().__init__(reason, position)
        self.reason = reason
        self.position = position

    def __str__(self) -> str:
        return f"{self.reason} (at byte {self.position})"

    def shifted(self, by: int) -> WireError:
        """Return the same error as seen from ``by`` bytes further left."""
        return type(self)(self.reason, self.position + by)


class FrameError(WireError):
    """The length words of a frame make no sense, so the stream cannot be followed any further."""


class HeaderError(WireError):
    """A frame's header cannot be read, or one of its fields is missing or wrong."""


class BodyError(WireError):
    """A body is not of the kind that its request or answer calls for."""


class RecordError(WireError):
    """A stored message is damaged."""


class DamagedMessage(RecordError):
    """A message that was pulled is damaged: its body does not match its checksum.

    It is not data: continue at ``next_offset``.

    ::

        try:
            outcome = consumer.pull(queue, offset)
        except DamagedMessage as error:
            outcome = consumer.pull(queue, error.next_offset)
    """

    def __init__(
        self, topic: str, broker: str, queue_id: int, offset: int, reason: str, message: Any = None
    ) -> None:
        super().__init__(reason)
        self.message = message
        """A `MessageView` with the damaged body; None if it could not be read so far."""
        self.topic = topic
        self.broker = broker
        self.queue_id = queue_id
        self.offset = offset
        self.next_offset = offset + 1

    def __str__(self) -> str:
        where = f"topic {self.topic}, broker {self.broker}, queue {self.queue_id}"
        return f"{where}, offset {self.offset}: {self.reason}"


class NetworkError(TurbopumpError):
    """Talking to a peer failed; whether it saw the request is unknown unless a subclass says."""

    retriable = True


class ListenFailed(NetworkError):
    """The listening address is in use, or does not belong to this machine."""


class ConnectFailed(NetworkError):
    """No answer at the address, or it is in its backoff after an earlier failure."""

    retry_after: float = 0
    """How long the next attempt to connect has to wait, in seconds."""

    last_failure: str = ""
    """Why the last attempt failed, without when; empty if unknown."""


class NoNameServer(ConnectFailed):
    """None of the name servers answered; the text lists them."""


class ConnectionLost(NetworkError):
    """The connection closed before the answer came; the peer may or may not have acted."""


class RequestTimeout(NetworkError):
    """No answer came in time; the peer may or may not have acted."""


class Overloaded(NetworkError):
    """This side has too many requests in flight or too many bytes unwritten; nothing was sent."""


class StoreError(TurbopumpError):
    """The store cannot do what was asked."""


class StoreClosed(StoreError):
    """The store is not open."""


class StoreInUse(StoreError):
    """The directory is already open, in this process or another."""


class StoreDamaged(StoreError):
    """The files are not what a store leaves behind, not even by a crash; nothing was changed."""


class DiskFailed(StoreError):
    """Files could not be read or deleted; the cause is attached. Nothing else has changed."""

    retriable = True


class WriteRefused(StoreError):
    """Nothing was stored or acknowledged; the store recovers by itself, so retry."""

    retriable = True


class DiskFull(WriteRefused):
    """No space is left, or more of the disk is used than the configured ratio allows."""


class WriteFailed(WriteRefused):
    """Writing or flushing failed, now or earlier without recovery; the cause is attached."""


class ServerFailed(TurbopumpError):
    """Raised out of a server's context when work that it cannot do without keeps failing."""


class ClientError(TurbopumpError):
    """A client cannot be used as it was; the text says what to do instead."""


class NotRunning(ClientError):
    """The client has not been started, or is closed."""


class ForkedClient(ClientError):
    """The client belongs to the parent process: connections cannot be shared, make another one."""


class MissingPackage(ClientError, ImportError):
    """An optional package is needed for this; the text says how to install it."""

    @classmethod
    def of_extra(cls, extra: str, wrong: str) -> MissingPackage:
        """Return an error for a package that comes with an extra of Turbopump."""
        return cls(
            f"{wrong}: install turbopump with its extra {extra}, in a checkout: "
            f"pip install '.[{extra}]'"
        )


class SparkError(TurbopumpError):
    """The Spark pipeline cannot continue."""


class JavaNotFound(SparkError):
    """There is no Java that runs Spark, or it is too old; the text says what to do."""


class DataLost(SparkError):
    """Messages that were to be read are gone from the broker: expired, or their topic deleted."""


class GroupInUse(SparkError):
    """Other consumers use the group that a query needs for itself."""


class AdministrationError(ClientError):
    """An administrative operation failed; the text says why."""


class NoBroker(AdministrationError):
    """No broker is registered with the name servers, so they know no topics and groups either."""

    retriable = True


class NotThere(AdministrationError):
    """There is no ``kind`` of this ``name``; ``similar`` are names that may have been meant."""

    def __init__(self, kind: str, name: str, similar: tuple[str, ...] = ()) -> None:
        super().__init__(kind, name, similar)
        self.kind = kind
        self.name = name
        self.similar = similar

    def __str__(self) -> str:
        meant = f"; similar: {', '.join(self.similar)}" if self.similar else ""
        return f"there is no {self.kind} {self.name!r}{meant}"


class AlreadyThere(AdministrationError):
    """The object already exists; nothing was changed."""


class StillInUse(AdministrationError):
    """A group has members, which would undo the change; nothing was changed."""


class TransactionNotStarted(TurbopumpError):
    """A broker has not stored the half message safely; it was rolled back, and nothing executed."""

    retriable = True


class NoRoute(TurbopumpError):
    """No name server knows the topic, or no broker of that name is known; it may appear soon."""

    retriable = True


_SYSTEM_ERROR = 1
_RETRIABLE_CODES = frozenset({2, 14, 215})
"""Busy, not available, flow control: the peer asks for another try, later or elsewhere."""


class RemoteError(TurbopumpError):
    """The peer answered with an error: its response ``code`` and its own words, ``remark``."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(code, remark)
        self.code = code
        self.remark = remark
        self.retriable = code in _RETRIABLE_CODES

    @classmethod
    def system(cls, remark: str) -> RemoteError:
        """Return an error for which the protocol has no code of its own (SYSTEM_ERROR)."""
        return cls(_SYSTEM_ERROR, remark)

    def __str__(self) -> str:
        return f"code {self.code}: {self.remark}"
