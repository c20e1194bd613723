"""Blocking clients, for programs without an event loop.

Each class wraps an asynchronous client, method by method, without duplicating code. Calls run on an
event loop in a separate thread, which all clients of the process share and which ends with the last
of them. Producers send on the caller's thread instead, see `SendingThreads`.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import logging
import queue
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

from turbopump.client import lite_pull_consumer, producer, pull_consumer, push_consumer, worker
from turbopump.client.arguments import wrong_arguments
from turbopump.client.background import CallersLoop, LoopThread, background, is_loop_thread
from turbopump.client.config import ClientConfig
from turbopump.client.handlers import Handler
from turbopump.client.life_cycle import LifeCycle, ServingLifeCycle, stop_signals
from turbopump.client.message_sender import (
    HandOverIO,
    MessageSender,
    TaskIO,
    ThreadIO,
    To,
    run_to_end,
)
from turbopump.client.send_hooks import SendReceipt
from turbopump.client.session import Session
from turbopump.client.shared_sessions import has_custom_sessions
from turbopump.clock import SYSTEM_CLOCK
from turbopump.durations import Duration
from turbopump.errors import ClientError, ForkedClient, NotRunning
from turbopump.machine.process import process_id, start_thread
from turbopump.message import Message, MessageFields
from turbopump.wire.record import MessageView

A = TypeVar("A")
S = TypeVar("S")
C = TypeVar("C", bound=LifeCycle)
S_ = TypeVar("S_", bound=ServingLifeCycle)
T = TypeVar("T")
P = ParamSpec("P")

SENDING_THREADS_MAX = 4
"""Threads of a producer that send directly; further threads send through the event loop.

On two cores, sending directly takes half the CPU time with two threads and 0.8 of it with four.
More threads contend for the interpreter's lock: 8 would send only 0.6 of what they send through the
loop, which writes the requests of many threads together, and 32 half of it.
"""

EXIT_WAIT_S = 5.0
"""How long process exit waits for clients that were not closed."""

_log = logging.getLogger(__name__)


# --- wrapping -------------------------------------------------------------------------------------


class Blocking(Generic[C]):
    """A client whose methods block; any number of threads may share it."""

    _client: C
    _thread: LoopThread | None = None
    _closed: concurrent.futures.Future[None] | None = None

    @property
    def _promises_max(self) -> int:
        """How many futures may be pending; further calls block. Most clients return none."""
        return 1

    def _hold(self, client: C) -> None:
        self._client = client
        self._promises: set[concurrent.futures.Future[Any]] = set()
        self._places = threading.Semaphore(self._promises_max)
        # Reentrant: a signal handler may close a client while its thread is in here.
        self._starting = threading.RLock()

    def start(self) -> None:
        """Start; ``with`` does this."""
        self._wait_closed()
        with self._starting:
            if self._thread is not None:
                self._require_own_process(self._thread)
                return
            _require_real_time(type(self).__name__)
            thread = background.join()
            try:
                run_on(thread, self._client.start)
            except BaseException:
                background.leave(thread)
                raise
            self._thread = thread
            _open[self] = thread, self._client, self._promises

    def close(self) -> None:
        """Close; ``with`` does this.

        Called from a callback, a hook or a listener of this client, it does not wait: the client
        closes as soon as they return.
        """
        if self._thread is not None:
            self._require_own_process(self._thread)
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._thread is not None and process_id() != self._thread.pid:
            # A child that leaves the parent's block has nothing of its own to close.
            return
        is_awaited = self._is_called_back()
        if not self._starting.acquire(blocking=not is_awaited):
            # The thread that starts this client waits for this one.
            start_thread(self.close, "turbopump-close", is_daemon=False)
            return
        try:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._closed = concurrent.futures.Future()
        finally:
            self._starting.release()
        if thread is None:
            self._wait_closed()
        elif is_awaited:
            finish = functools.partial(self._finish, thread, *raised)
            # Not a daemon: the process must not exit before it is done.
            start_thread(finish, "turbopump-close", is_daemon=False)
        else:
            self._finish(thread, *raised)

    def _finish(self, thread: LoopThread, *raised: object) -> None:
        assert self._closed is not None
        try:
            self._wait_for_calls()
            run_on(thread, self._client.__aexit__, *raised)
        finally:
            _open.pop(self, None)
            try:
                background.leave(thread)
            finally:
                # Whatever happened: the next start waits for it.
                self._closed.set_result(None)

    def _wait_for_calls(self) -> None:
        """Wait for calls that must finish before the client closes."""
        concurrent.futures.wait(tuple(self._promises))

    def _wait_closed(self) -> None:
        """Wait for another thread that is closing, unless it waits for this one."""
        if self._closed is not None and not self._is_called_back():
            concurrent.futures.wait([self._closed])

    def _is_called_back(self) -> bool:
        """Whether this is a thread that closing would wait for."""
        return is_loop_thread()

    def _release_slot(self, promise: concurrent.futures.Future[Any]) -> None:
        self._promises.discard(promise)
        self._places.release()

    def _running(self) -> LoopThread:
        if self._thread is None:
            name = type(self).__name__
            raise NotRunning(f"this {name} is not running: use it inside `with`, or call start()")
        self._require_own_process(self._thread)
        return self._thread

    def _require_own_process(self, thread: LoopThread) -> None:
        if process_id() != thread.pid:
            raise ForkedClient(
                f"this {type(self).__name__} was started in process {thread.pid} and is used in "
                f"{process_id()}: create producers and consumers after the fork"
            )


def _require_real_time(name: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if has_custom_sessions():
        raise ClientError(
            f"a blocking {name} would block this event loop, in which turbopump_cluster runs: use"
            f" the asyncio client {name} (turbopump.aio), or test with turbopump_server"
        )


_Opened = tuple[LoopThread, LifeCycle, set[concurrent.futures.Future[Any]]]
_open: dict[Blocking[Any], _Opened] = {}
"""Clients that were not closed: their thread, the asynchronous client, and pending futures."""


@atexit.register
def _close_all() -> None:
    """Give submitted messages a chance to be sent, and report those that were not."""
    end_s = SYSTEM_CLOCK.monotonic_ms() / 1000 + EXIT_WAIT_S
    # A child process has no cleanup to do for its parent.
    own = [each for each in tuple(_open.values()) if each[0].pid == process_id()]
    promises = [promise for _, _, pending in own for promise in tuple(pending)]
    lost = concurrent.futures.wait(promises, timeout=EXIT_WAIT_S).not_done
    if lost:
        _log.error(
            "%d submitted messages were not sent within %g s of the end of the process, and are"
            " lost unless a broker has stored them: close producers before",
            len(lost),
            EXIT_WAIT_S,
        )
    for thread, client, _ in own:
        # The program did not confirm the messages delivered last.
        exit_ = NotRunning, NotRunning("the process ended without close()"), None
        try:
            # The thread ends with the process.
            thread.run(client.__aexit__(*exit_), end_s)
        except Exception as error:  # noqa: BLE001 - the other clients must be closed too
            _log.warning("%r was not closed before the process ended: %r", client, error)


def run_on(
    thread: LoopThread, call: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call on the loop and wait for the result."""
    thread.require_other()
    return thread.run(call(*args, **kwargs))


def built_by(
    kind: Callable[P, C],
) -> Callable[[Callable[[S], None]], Callable[Concatenate[S, P], None]]:
    """Give the constructor the parameters of an asynchronous client's."""

    def decorate(_: Callable[[S], None]) -> Callable[Concatenate[S, P], None]:
        def construct(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            self._hold(kind(*args, **kwargs))

        # Where `help` and notebooks find the parameters.
        construct.__name__ = "__init__"
        vars(construct)["__wrapped__"] = inspect.getattr_static(kind, "__init__")
        return construct

    return decorate


def blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Wrap an asynchronous method: block until it is done."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        bound = functools.partial(method, self._client)
        return run_on(self._running(), bound, *args, **kwargs)

    return _documented(call, method)


def on_loop(method: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Wrap a plain method of an asynchronous client, which only its loop may call."""

    async def run(client: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(client, *args, **kwargs)

    return _documented(blocking(run), method)


def promising(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, asyncio.Future[T]]], text: str = ""
) -> Callable[Concatenate[Any, P], concurrent.futures.Future[T]]:
    """Wrap a method that returns a future: threads can wait for that.

    Return immediately unless too many sends are in flight; then block. ``text`` is the docstring if
    the wrapped method's shows asyncio code.
    """

    async def fulfill(client: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await (await method(client, *args, **kwargs))

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        thread = self._running()
        thread.require_other()
        self._places.acquire()
        promise: concurrent.futures.Future[T] = concurrent.futures.Future()
        promise.set_running_or_notify_cancel()
        self._promises.add(promise)
        promise.add_done_callback(self._release_slot)
        context = contextvars.copy_context()
        try:
            thread.post(
                lambda: thread.start(fulfill(self._client, *args, **kwargs), promise, context)
            )
        except NotRunning as error:
            promise.set_exception(error)
        return promise

    taken = inspect.signature(method)
    # The asynchronous method returns another kind of future.
    vars(call)["__signature__"] = taken.replace(return_annotation=concurrent.futures.Future)
    return _documented(call, method, text)


class SendingThreads:
    """The threads that are inside a send of one producer, in its hooks or in a signal handler."""

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}
        """By thread; each changes only its own entry, so no lock is needed."""
        # A signal handler that sends may interrupt its methods, but not those of an Event.
        self._left: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_awaited = False

    @property
    def is_sending(self) -> bool:
        """Whether the calling thread is one of them."""
        return threading.get_ident() in self._depths

    def __enter__(self) -> int:
        """Enter as one of them; return how many there are."""
        thread = threading.get_ident()
        self._depths[thread] = self._depths.get(thread, 0) + 1
        return len(self._depths)

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        depth = self._depths[thread] - 1
        if depth:
            self._depths[thread] = depth
        else:
            del self._depths[thread]
            if self._is_awaited:
                self._left.put(None)

    def wait_done(self) -> None:
        """Wait for the sends that have begun; each has its own timeout."""
        self._is_awaited = True
        while self._depths:
            # With a timeout: a signal that arrives just before waiting would have no effect.
            with contextlib.suppress(queue.Empty):
                self._left.get(timeout=0.5)
        self._is_awaited = False


def sending(
    method: Callable[..., Coroutine[Any, Any, T]],
    documented: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
    threads_max: int = SENDING_THREADS_MAX,
) -> Callable[Concatenate[Any, P], T]:
    """Wrap a `MessageSender` method: send on the caller's thread, unless too many threads do.

    ``documented`` is the public method of the asynchronous client: its parameters are the wrapped
    method's, without those that only other parts of the client pass.
    """

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        # First: closing waits for threads in here, and refuses later ones.
        with self._senders as senders:
            thread: LoopThread | None = self._thread
            if thread is None or process_id() != thread.pid or is_loop_thread():
                # Raises the error that applies.
                thread = self._running()
                thread.require_other()
            running: producer.Running = self._client.running
            own, shared = self._send_io(running.session, thread)
            is_own = senders <= threads_max and running.session.has_blocking_pool
            try:
                work = method(running.sender, own if is_own else shared, *args, **kwargs)
            except TypeError as error:
                raise wrong_arguments(error, documented, args, kwargs) from None
            return run_to_end(work)

    return _documented(call, documented)


def _documented(call: T, method: Callable[..., object], text: str = "") -> T:
    """Give a method the wrapped one's name, and ``text`` or its docstring without ``await``."""
    if not text:
        text = (method.__doc__ or "").replace("async with", "with").replace("await ", "")
        text = text.replace("async def", "def")
    # `__wrapped__` is where `help` and notebooks find the parameters.
    for name, value in (("__name__", method.__name__), ("__doc__", text), ("__wrapped__", method)):
        setattr(call, name, value)
    return call


def documented_by(method: Callable[..., object]) -> Callable[[T], T]:
    """Give a method the name, parameters and docstring of an asynchronous one."""
    return functools.partial(_documented, method=method)


# --- the clients ----------------------------------------------------------------------------------


class Producer(Blocking[producer.Producer]):
    """Sends messages to a cluster; threads may share one.

    ::

        with Producer("orders-producer", nameserver="127.0.0.1:9876") as producer:
            receipt = producer.send(Message("orders", b"hello", tags="created"))
    """

    @built_by(producer.Producer)
    def __init__(self) -> None: ...

    @property
    def _promises_max(self) -> int:
        return self._client.in_flight_max

    def _hold(self, client: producer.Producer) -> None:
        super()._hold(client)
        self._senders = SendingThreads()
        self._io: tuple[Session, ThreadIO, TaskIO] | None = None

    def _send_io(self, session: Session, thread: LoopThread) -> tuple[ThreadIO, TaskIO]:
        """Return the I/O of threads: on their own connections, and through the loop."""
        if self._io is None or self._io[0] is not session:
            self._io = session, ThreadIO(session, thread), self._shared_io(session, thread)
        return self._io[1:]

    def _shared_io(self, session: Session, thread: LoopThread) -> TaskIO:
        return HandOverIO(session, thread)

    send = sending(MessageSender.send, producer.Producer.send)

    @documented_by(producer.Producer.send_json)
    def send_json(
        self,
        topic: str,
        value: object,
        *,
        to: To = None,
        timeout: Duration | None = None,
        **fields: Unpack[MessageFields],
    ) -> SendReceipt:
        message = Message.with_json(topic, value, **fields)
        return self.send(message, to=to, timeout=timeout)

    send_batch = sending(MessageSender.send_batch, producer.Producer.send_batch)
    send_ready = sending(MessageSender.send_ready, producer.Producer.send_ready)
    # On one connection per thread, which keeps their order; no response is awaited.
    send_oneway = sending(MessageSender.send_oneway, producer.Producer.send_oneway, sys.maxsize)
    submit = promising(
        producer.Producer.submit,
        """Hand a message over and return a future of its receipt, to keep many sends in flight.

        Block while `ProducerConfig.in_flight_max` messages are in flight. ``on_sent`` is called
        exactly once, in the client's own thread, and must not block.

        ::

            promises = [producer.submit(message) for message in messages]
            receipts = [promise.result() for promise in promises]
        """,
    )
    request = blocking(producer.Producer.request)
    reply = blocking(producer.Producer.reply)
    queues = blocking(producer.Producer.queues)

    def _wait_for_calls(self) -> None:
        self._senders.wait_done()
        super()._wait_for_calls()

    def _is_called_back(self) -> bool:
        return super()._is_called_back() or self._senders.is_sending


class WorkersProducer(Producer):
    """The producer of a `Worker`, for its functions in threads; the worker starts and closes it."""

    def __init__(self, client: producer.Producer) -> None:
        self._hold(client)
        self._thread = self._loop = CallersLoop()

    def __exit__(self, *raised: object) -> None:
        pass

    def _shared_io(self, session: Session, thread: LoopThread) -> TaskIO:
        # Loops in virtual time know what threads wait for by its task.
        return TaskIO(session, thread)

    def leave(self) -> None:
        """Refuse further sends, of functions that the worker no longer waits for."""
        self._loop.leave()


class PullConsumer(Blocking[pull_consumer.PullConsumer]):
    """Reads queues at offsets that the application chooses; threads may share one.

    ::

        with PullConsumer("audit", nameserver="127.0.0.1:9876") as consumer:
            for queue in consumer.queues("orders"):
                outcome = consumer.pull(queue, consumer.committed(queue) or 0)
                consumer.commit(queue, outcome.next_offset)
    """

    @built_by(pull_consumer.PullConsumer)
    def __init__(self) -> None: ...

    queues = blocking(pull_consumer.PullConsumer.queues)
    pull = blocking(pull_consumer.PullConsumer.pull)
    pull_when_found = blocking(pull_consumer.PullConsumer.pull_when_found)
    send_back = blocking(pull_consumer.PullConsumer.send_back)
    committed = blocking(pull_consumer.PullConsumer.committed)
    commit = blocking(pull_consumer.PullConsumer.commit)
    min_offset = blocking(pull_consumer.PullConsumer.min_offset)
    max_offset = blocking(pull_consumer.PullConsumer.max_offset)
    offset_at = blocking(pull_consumer.PullConsumer.offset_at)


class LitePullConsumer(Blocking[lite_pull_consumer.LitePullConsumer]):
    """Reads topics by polling, sharing queues with its group, or reads manually assigned queues.

    Only one thread may poll or iterate: requesting more confirms the messages before.

    ::

        with LitePullConsumer(
            "audit", nameserver="127.0.0.1:9876", subscriptions={"orders": "*"}
        ) as consumer:
            for message in consumer:
                print(message.body)
    """

    @built_by(lite_pull_consumer.LitePullConsumer)
    def __init__(self) -> None: ...

    subscribe = blocking(lite_pull_consumer.LitePullConsumer.subscribe)
    unsubscribe = blocking(lite_pull_consumer.LitePullConsumer.unsubscribe)
    assign = blocking(lite_pull_consumer.LitePullConsumer.assign)
    queues = blocking(lite_pull_consumer.LitePullConsumer.queues)
    assignment = on_loop(lite_pull_consumer.LitePullConsumer.assignment)
    pause = on_loop(lite_pull_consumer.LitePullConsumer.pause)
    resume = on_loop(lite_pull_consumer.LitePullConsumer.resume)
    poll = blocking(lite_pull_consumer.LitePullConsumer.poll)
    seek = blocking(lite_pull_consumer.LitePullConsumer.seek)
    seek_to_begin = blocking(lite_pull_consumer.LitePullConsumer.seek_to_begin)
    seek_to_end = blocking(lite_pull_consumer.LitePullConsumer.seek_to_end)
    commit = blocking(lite_pull_consumer.LitePullConsumer.commit)
    committed = blocking(lite_pull_consumer.LitePullConsumer.committed)
    offset_at = blocking(lite_pull_consumer.LitePullConsumer.offset_at)
    _next = blocking(lite_pull_consumer.LitePullConsumer.__anext__)

    def __iter__(self) -> Iterator[MessageView]:
        return self

    def __next__(self) -> MessageView:
        try:
            return self._next()
        except StopAsyncIteration:
            raise StopIteration from None


class Serving(Blocking[S_]):
    """A client that calls the application until it is closed."""

    @documented_by(ServingLifeCycle.wait)
    def wait(self, *, handle_signals: bool = True) -> None:
        if self._thread is None and self._closed is not None:
            # The application has closed it before it came here.
            self._wait_closed()
            return
        thread = self._running()
        begin = functools.partial(thread.post, self._client.begin_closing)
        with stop_signals(begin) if handle_signals else contextlib.nullcontext():
            run_on(thread, self._client.wait, handle_signals=False)

    def _is_called_back(self) -> bool:
        return super()._is_called_back() or self._client.is_calling


class PushConsumer(Serving[push_consumer.PushConsumer]):
    """Delivers every message of its topics to a listener, at least once.

    ::

        def handle(messages, context):
            print(messages[0].body)
            return ConsumeResult.SUCCESS

        with PushConsumer("billing", handle, nameserver="127.0.0.1:9876",
                          subscriptions={"orders": "created || paid"}) as consumer:
            consumer.wait()
    """

    @built_by(push_consumer.PushConsumer)
    def __init__(self) -> None: ...

    subscribe = blocking(push_consumer.PushConsumer.subscribe)
    unsubscribe = blocking(push_consumer.PushConsumer.unsubscribe)
    suspend = on_loop(push_consumer.PushConsumer.suspend)
    resume = on_loop(push_consumer.PushConsumer.resume)
    resize = on_loop(push_consumer.PushConsumer.resize)
    assignment = on_loop(push_consumer.PushConsumer.assignment)
    commit = blocking(push_consumer.PushConsumer.commit)


class Worker(Serving[worker.Worker]):
    """Consumes with functions decorated with `turbopump.consumer`.

    ::

        with Worker(bill, ship, nameserver="127.0.0.1:9876") as worker:
            worker.wait()
    """

    @built_by(worker.Worker)
    def __init__(self) -> None: ...

    @property
    def groups(self) -> list[str]:
        """The consumer groups of the functions."""
        return self._client.groups

    @documented_by(worker.Worker.connect_to)
    def connect_to(self, nameserver: str | Sequence[str]) -> None:
        self._client.connect_to(nameserver)


def run(
    *handlers: Handler[..., Any],
    nameserver: str | Sequence[str] = "",
    namespace: str = "",
    client: ClientConfig | None = None,
) -> None:
    """Consume with decorated functions until SIGINT or SIGTERM.

    ::

        run(bill, ship, nameserver="127.0.0.1:9876")
    """
    with Worker(*handlers, nameserver=nameserver, namespace=namespace, client=client) as running:
        running.wait()
