"""A name server and a broker on real sockets, with scripted answers to batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from turbopump.client.background import LoopThread
from turbopump.net.connection import Connection
from turbopump.net.router import Router
from turbopump.net.server import Server
from turbopump.net.sockets import SocketNetwork
from turbopump.wire.batch import decode_batch
from turbopump.wire.bodies import BrokerData, QueueData, TopicRoute
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.headers import SendMessageAnswer, SendMessageV2

QUEUES = 4
READ_AND_WRITE = 6


@dataclass(frozen=True)
class Batch:
    """The messages of one send: a batch, or a single message."""

    number: int
    """Counts received batches, from 0."""

    broker: str
    queue_id: int
    bodies: tuple[bytes, ...]
    request: Command
    peer: Connection


Decide = Callable[[Batch], Command | None]
"""Returns the answer to a batch; None answers later, or never."""


def taken(batch: Batch, code: int = ResponseCode.SUCCESS) -> Command:
    """Return the answer to a stored batch."""
    return batch.request.answer(
        code, SendMessageAnswer(msg_id="AB", queue_id=batch.queue_id, queue_offset=7)
    )


def refused(batch: Batch, code: int, words: str = "in the broker's words") -> Command:
    return batch.request.answer(code, remark=words)


@dataclass
class ScriptedBroker:
    """Answers clients' requests, and lets ``decide`` answer batches."""

    decide: Decide
    batches: list[Batch] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)
    """Bodies of batches that were answered immediately with success."""

    address: str = ""
    others: dict[str, str] = field(default_factory=dict)
    """Addresses of additional brokers in the route, by name."""

    topics: list[str] = field(default_factory=list)
    """Topics whose routes were requested."""

    post: Callable[[Callable[[], object]], object] = field(default=lambda call: call())
    """Calls a function on the broker's event loop."""

    def route(self, request: Command, _: Connection) -> Command:
        self.topics.append((request.ext_fields or {})["topic"])
        addresses = {"a": self.address, **self.others}
        route = TopicRoute(
            broker_datas=[
                BrokerData(broker_addrs={0: address}, broker_name=name, cluster="c")
                for name, address in addresses.items()
            ],
            queue_datas=[
                QueueData(
                    broker_name=name,
                    perm=READ_AND_WRITE,
                    read_queue_nums=QUEUES,
                    write_queue_nums=QUEUES,
                )
                for name in addresses
            ],
        )
        return request.answer(ResponseCode.SUCCESS, body=route.encode())

    def agree(self, request: Command, _: Connection) -> Command:
        return request.answer(ResponseCode.SUCCESS)

    def send(self, request: Command, peer: Connection) -> Command | None:
        header = SendMessageV2.from_ext_fields(request.ext_fields)
        body = whole_body(request)
        bodies = tuple(entry.body for entry in decode_batch(body)) if header.batch else (body,)
        batch = Batch(len(self.batches), "a", header.queue_id, bodies, request, peer)
        self.batches.append(batch)
        answer = self.decide(batch)
        if answer is not None and answer.code == ResponseCode.SUCCESS:
            self.stored += bodies
        return answer

    def heartbeat(self, request: Command, peer: Connection) -> Command:
        return self.agree(request, peer)

    def router(self) -> Router:
        return Router(
            {
                RequestCode.GET_ROUTEINFO_BY_TOPIC: self.route,
                RequestCode.HEART_BEAT: self.heartbeat,
                RequestCode.UNREGISTER_CLIENT: self.agree,
                RequestCode.SEND_MESSAGE_V2: self.send,
                RequestCode.SEND_BATCH_MESSAGE: self.send,
            }
        )


B = TypeVar("B", bound=ScriptedBroker)


def scripted_broker(decide: Decide) -> AbstractContextManager[ScriptedBroker]:
    """Run it in a separate thread, where ``decide`` is called."""
    return serving(ScriptedBroker(decide))


@contextmanager
def serving(broker: B) -> Iterator[B]:
    """Run any scripted broker in a separate thread."""
    server = Server(SocketNetwork(), broker.router())
    thread = LoopThread()
    try:
        thread.run(server.start())
        broker.address = server.address
        broker.post = thread.post
        yield broker
    finally:
        thread.run(server.close())
        thread.stop()
