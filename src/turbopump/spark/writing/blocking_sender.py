"""Sending rows from the task's own thread, with many requests in flight: the first attempts.

A send that is refused, lost or times out is handed to `RetryingSender`, and nothing else is sent
until it is stored. First attempts through its event loop would take 10 to 15 % more processor time
per row, and 25 % more with bodies of 1 KiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from turbopump.client.calls import send_command, stored
from turbopump.client.names import with_namespace
from turbopump.client.queue_choice import QueueChoice
from turbopump.clock import Clock
from turbopump.errors import (
    ConnectionLost,
    InvalidArgument,
    NetworkError,
    NoRoute,
    RemoteError,
    RequestTimeout,
)
from turbopump.message import MessageQueue
from turbopump.net.blocking_connection import BlockingConnection, readable
from turbopump.spark.shared_session import SharedSession
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.retrying_sender import Refused, RetryingSender, Targets, UnfinishedSend
from turbopump.spark.writing.row_encoder import EncodedRows
from turbopump.spark.writing.send_planner import Destination, Send, sends
from turbopump.wire.command import Command, Response

TARGETS_FRESH_MS = 1000
"""How long a task uses cached broker addresses before it asks its session again."""

AVOIDED_MS = 10_000
"""How long to avoid a broker that could not be reached, if there are others."""

_Number = tuple[BlockingConnection, int]
"""The key of a response: its connection, and the number of its request."""


@dataclass(frozen=True, slots=True)
class _Unanswered:
    send: Send
    queue: MessageQueue
    start_ms: int
    cuts: int
    """The window's `cuts` when it started."""


class BlockingSender:
    """Makes the first attempts of a task's sends; belongs to the task's thread."""

    def __init__(
        self, shared: SharedSession, sending: RetryingSender, options: SinkOptions
    ) -> None:
        self._shared = shared
        self._sending = sending
        self._options = options
        self._clock: Clock = shared.session.clock
        self._pool = shared.session.blocking_pool()
        self._group = with_namespace(options.namespace, options.group)
        self._rules = options.rules()
        self._choice = QueueChoice(shared.session.random)
        self._targets = Targets({}, {})
        self._fresh_until_ms = 0
        self._unreachable: frozenset[str] = frozenset()
        self._avoided_until_ms = 0
        self._connections: dict[str, BlockingConnection] = {}
        self._unanswered: dict[_Number, _Unanswered] = {}
        self._failed: list[UnfinishedSend] = []

    def take(self, rows: EncodedRows) -> None:
        """Send rows, waiting for room in the send window; raises if a send has finally failed."""
        if not rows.topics:
            return
        is_known = self._targets.queues.keys() >= set(rows.topics)
        if not is_known or self._clock.monotonic_ms() >= self._fresh_until_ms:
            self._ask_for_targets(rows)
        queues, cuts = self._targets.queues, self._sending.cuts
        for send in in_turn(sends(rows, queues, cuts, self._sending.partition)):
            self._make_room(send.destination)
            if self._failed:
                self.finish()
                self._ask_for_targets(rows)
            self._sending.require_lease()
            self._send(send, self._targets)

    def finish(self) -> None:
        """Wait until all rows are stored; raises if a send has finally failed."""
        while self._unanswered:
            self._receive()
        if self._failed:
            failed, self._failed = self._failed, []
            failed.sort(key=lambda each: each.send.rows[0])
            self._shared.run(lambda _: self._sending.retry(failed))

    def close(self) -> None:
        """Abandon pending sends, and leave idle connections to the next task."""
        waited_for = {connection for connection, _ in self._unanswered}
        try:
            for connection in self._connections.values():
                if connection in waited_for:
                    connection.close()
                else:
                    self._pool.give_back(connection)
        finally:
            self._connections.clear()
            self._unanswered.clear()
            self._shared.run(lambda _: self._sending.producer.close())

    # --- sending ----------------------------------------------------------------------------------

    def _ask_for_targets(self, rows: EncodedRows) -> None:
        self._targets = self._shared.run(lambda _: self._sending.targets(rows))
        self._fresh_until_ms = self._clock.monotonic_ms() + TARGETS_FRESH_MS

    def _make_room(self, destination: Destination) -> None:
        """Wait for room, and for the previous send to the same ordered queue."""
        while len(self._unanswered) >= self._sending.window.size or self._is_busy(destination):
            self._receive()

    def _is_busy(self, destination: Destination) -> bool:
        if not isinstance(destination, MessageQueue):
            return False
        return any(each.send.destination == destination for each in self._unanswered.values())

    def _send(self, send: Send, targets: Targets) -> None:
        destination, start_ms = send.destination, self._clock.monotonic_ms()
        queue = (
            destination
            if isinstance(destination, MessageQueue)
            else self._next_queue(targets.queues[destination])
        )
        noted = _Unanswered(send, queue, start_ms, self._sending.window.cuts)
        connection = None
        try:
            command = self._command(send, queue)
            connection = self._connection(queue.broker, targets.addresses)
            number = connection.send(command, self._options.send_timeout_ms)
        except (InvalidArgument, NetworkError, NoRoute) as error:
            if connection is not None and isinstance(error, NetworkError):
                self._give_up(connection, error)
            self._note_failure(noted, error)
        else:
            self._unanswered[connection, number] = noted

    def _next_queue(self, queues: Sequence[MessageQueue]) -> MessageQueue:
        is_avoided = self._clock.monotonic_ms() < self._avoided_until_ms
        return self._choice.next(queues, self._unreachable if is_avoided else ())

    def _command(self, send: Send, queue: MessageQueue) -> Command:
        ready = self._sending.outgoing(send)
        queues_wanted = self._rules.new_topic_queues
        header = ready.header(self._group, queue, self._clock.now_ms(), queues_wanted)
        return send_command(header, ready.body)

    def _connection(self, broker: str, addresses: Mapping[str, str]) -> BlockingConnection:
        address = addresses.get(broker)
        if address is None:
            raise NoRoute(f"no name server knows a master of broker {broker!r}")
        found = self._connections.get(address)
        if found is not None:
            if any(found is waiting for waiting, _ in self._unanswered) or found.is_usable():
                return found
            found.close()
        made = self._connections[address] = self._pool.take(address)
        return made

    # --- answers ----------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Wait for responses and process them, or their timeout."""
        connections = {connection for connection, _ in self._unanswered}
        # The arrival time of responses that arrived unobserved is unknown.
        ready, is_timed = readable(connections, 0), False
        if not ready:
            first_ms = min(each.start_ms for each in self._unanswered.values())
            end_ms = first_ms + self._options.send_timeout_ms
            left_ms = max(0, end_ms - self._clock.monotonic_ms())
            ready, is_timed = readable(connections, left_ms), True
        for connection in ready:
            try:
                answers = connection.responses()
            except NetworkError as error:
                self._give_up(connection, error)
            else:
                for answer in answers:
                    self._answered((connection, answer.opaque), answer, is_timed=is_timed)
        if not ready:
            self._note_late()

    def _answered(self, number: _Number, answer: Response, *, is_timed: bool) -> None:
        noted = self._unanswered.pop(number, None)
        if noted is None:
            # Late: the send has been retried.
            return
        try:
            status = stored(answer).status
        except RemoteError as error:
            self._note_failure(noted, error)
            return
        elapsed_ms = self._clock.monotonic_ms() - noted.start_ms
        self._sending.window.answered(elapsed_ms if is_timed else None)
        if self._sending.is_stored(status):
            self._sending.counts.add(noted.send)
        else:
            self._failed.append(UnfinishedSend(noted.send, noted.queue, status))

    def _note_failure(self, noted: _Unanswered, error: Refused) -> None:
        if error.retriable:
            self._sending.window.busy(noted.cuts)
        if isinstance(error, NetworkError | NoRoute):
            self._unreachable = frozenset({noted.queue.broker})
            self._avoided_until_ms = self._clock.monotonic_ms() + AVOIDED_MS
        self._failed.append(UnfinishedSend(noted.send, noted.queue, error))

    def _note_late(self) -> None:
        """Fail overdue sends, and release unresponsive connections."""
        limit_ms = self._options.send_timeout_ms
        now_ms = self._clock.monotonic_ms()
        for (connection, number), noted in list(self._unanswered.items()):
            if now_ms - noted.start_ms < limit_ms:
                continue
            if self._unanswered.pop((connection, number), None) is None:
                # It already failed together with its connection.
                continue
            text = f"no response from {connection.address} within {limit_ms} ms"
            self._note_failure(noted, RequestTimeout(text))
            if connection.received_ms < noted.start_ms:
                silence = f"connection to {connection.address}: no data for {limit_ms} ms"
                self._give_up(connection, ConnectionLost(silence))

    def _give_up(self, connection: BlockingConnection, error: NetworkError) -> None:
        """Fail everything that waits for a connection, and release it."""
        connection.close()
        self._connections.pop(connection.address, None)
        for number in [each for each in self._unanswered if each[0] is connection]:
            noted = self._unanswered.pop(number)
            self._note_failure(noted, error)


def in_turn(encoded: Iterable[Send]) -> Iterator[Send]:
    """Interleave destinations: a send to a queue waits for the previous one to that queue."""
    destinations: dict[Destination, list[Send]] = {}
    for send in encoded:
        destinations.setdefault(send.destination, []).append(send)
    for together in zip_longest(*destinations.values()):
        yield from (send for send in together if send is not None)
