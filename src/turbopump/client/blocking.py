"""The same clients for programs without an event loop.

Every class here wraps one of the asynchronous ones, method by method and without a copy of any
code: calls are handed to an event loop in a thread of its own, which all clients of the process
share and which ends with the last of them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from turbopump.client import lite_pull_consumer, producer, pull_consumer, push_consumer
from turbopump.errors import ClientError, ForkedClient, NotRunning
from turbopump.net.loop import fastest_loop
from turbopump.wire.record import MessageView


class Client(Protocol):
    """What all asynchronous clients can do."""

    async def start(self) -> None: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


A = TypeVar("A")
S = TypeVar("S")
C = TypeVar("C", bound=Client)
T = TypeVar("T")
P = ParamSpec("P")

_CLOSED = "the client was closed before this was done"

PROMISES_MAX = 1000
"""Of one client that are not kept yet; who wants more has to wait."""


# --- the loop -------------------------------------------------------------------------------------


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.users = 0
        self._loop = fastest_loop()()
        # A daemon: a program that forgets to close its clients must be able to end.
        self._thread = threading.Thread(target=self._main, name="turbopump-client", daemon=True)
        self._inbox: deque[Callable[[], object]] = deque()
        self._is_woken = False
        self._is_stopped = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: set[threading.Lock] = set()
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            if not self._is_stopped:
                # Something ended the loop that must not: nobody may wait for it any longer.
                self._is_stopped = True
                for finished in list(self._waiting):
                    finished.release()

    def post(self, call: Callable[[], object]) -> None:
        """Have something called on the loop soon, in the order of asking."""
        self._inbox.append(call)
        if self._is_stopped and call in self._inbox:
            # Too late: what was there when the loop stopped has been called, this will not be.
            raise NotRunning(_CLOSED)
        # Waking the loop costs more than anything else here, so it is done once for many. What was
        # appended before the flag is cleared is taken out after that.
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._take_posts)

    def _take_posts(self) -> None:
        self._is_woken = False
        while self._inbox:
            self._inbox.popleft()()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the loop and wait for its result; who stops waiting stops it."""
        # A bare lock instead of a concurrent Future: this is half of what a blocking call costs.
        finished = threading.Lock()
        finished.acquire()
        tasks: list[asyncio.Task[T]] = []
        # The caller's, not that of whoever woke the loop: a send belongs to the caller's trace.
        context = contextvars.copy_context()

        def begin() -> None:
            task = self._loop.create_task(work, context=context)
            tasks.append(task)
            task.add_done_callback(lambda _: finished.release())

        self._waiting.add(finished)
        try:
            self.post(begin)
            finished.acquire()
        except NotRunning:
            raise
        except BaseException:
            self.post(lambda: tasks[0].cancel())
            raise
        finally:
            self._waiting.discard(finished)
        if not tasks or not tasks[0].done() or tasks[0].cancelled():
            raise NotRunning(_CLOSED)
        return tasks[0].result()

    def start(
        self,
        work: Coroutine[Any, Any, T],
        promise: concurrent.futures.Future[T],
        context: contextvars.Context,
    ) -> None:
        """Run something whose result is promised; to be called on the loop."""
        task = self._loop.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._keep, promise))

    def _keep(self, promise: concurrent.futures.Future[T], done: asyncio.Task[T]) -> None:
        self._tasks.discard(done)
        if done.cancelled():
            promise.set_exception(NotRunning(_CLOSED))
        elif (error := done.exception()) is not None:
            promise.set_exception(error)
        else:
            promise.set_result(done.result())

    def require_other(self) -> None:
        """Refuse the loop's own thread: waiting there for the loop would be for ever."""
        if threading.current_thread() is self._thread:
            raise ClientError(
                "a blocking client was called on its own event loop, where it would wait for "
                "ever: use turbopump.aio in async functions and in callbacks"
            )

    def stop(self) -> None:
        """End the loop and its thread, and whatever other threads still wait for."""
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _finish(self) -> None:
        self._is_stopped = True
        self._take_posts()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class _Background:
    """The loop that all clients of the process share, from the first to the last of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: _LoopThread | None = None
        self._of_parents: list[_LoopThread | None] = []

    def join(self) -> _LoopThread:
        with self._lock:
            if self._current is None:
                self._current = _LoopThread()
            self._current.users += 1
            return self._current

    def leave(self, thread: _LoopThread) -> None:
        with self._lock:
            thread.users -= 1
            if thread.users:
                return
            if self._current is thread:
                self._current = None
        thread.stop()

    def after_fork(self) -> None:
        """Begin anew in a child; the parent's loop is left alone, as its sockets are shared."""
        self._lock = threading.Lock()
        self._of_parents.append(self._current)
        self._current = None


_background = _Background()
os.register_at_fork(after_in_child=_background.after_fork)


# --- wrapping -------------------------------------------------------------------------------------


class Blocking(Generic[C]):
    """A client that is called like any other object, from any number of threads."""

    _client: C
    _thread: _LoopThread | None = None

    def _hold(self, client: C) -> None:
        self._client = client
        self._promises: set[concurrent.futures.Future[Any]] = set()
        self._places = threading.Semaphore(PROMISES_MAX)
        self._starting = threading.Lock()

    def start(self) -> None:
        """Begin; not needed inside ``with``."""
        with self._starting:
            if self._thread is not None:
                self._require_own_process(self._thread)
                return
            thread = _background.join()
            try:
                _result(thread, self._client.start)
            except BaseException:
                _background.leave(thread)
                raise
            self._thread = thread

    def close(self) -> None:
        """End; not needed inside ``with``."""
        if self._thread is not None:
            self._require_own_process(self._thread)
            self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread is not None and os.getpid() != self._thread.pid:
            # A child that leaves the parent's block has nothing of its own to close.
            return
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            concurrent.futures.wait(tuple(self._promises))
            _result(thread, self._client.__aexit__, kind, error, traceback)
        finally:
            _background.leave(thread)

    def _kept(self, promise: concurrent.futures.Future[Any]) -> None:
        self._promises.discard(promise)
        self._places.release()

    def _running(self) -> _LoopThread:
        if self._thread is None:
            name = type(self).__name__
            raise NotRunning(f"this {name} is not running: use it inside `with`, or call start()")
        self._require_own_process(self._thread)
        return self._thread

    def _require_own_process(self, thread: _LoopThread) -> None:
        if os.getpid() != thread.pid:
            raise ForkedClient(
                f"this {type(self).__name__} was started in process {thread.pid} and is used in "
                f"{os.getpid()}: make producers and consumers after the fork"
            )


def _result(
    thread: _LoopThread,
    call: Callable[P, Coroutine[Any, Any, T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call on the loop and wait for the result."""
    thread.require_other()
    return thread.run(call(*args, **kwargs))


def built_by(
    kind: Callable[P, C],
) -> Callable[[Callable[[S], None]], Callable[Concatenate[S, P], None]]:
    """Make the constructor take what an asynchronous client's takes."""

    def decorate(_: Callable[[S], None]) -> Callable[Concatenate[S, P], None]:
        def construct(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            self._hold(kind(*args, **kwargs))

        return construct

    return decorate


def blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Make a method of an asynchronous one: it returns when that is done."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        bound = functools.partial(method, self._client)
        return _result(self._running(), bound, *args, **kwargs)

    return _documented(call, method)


def on_loop(method: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Make a method of a plain one of an asynchronous client, which only its loop may call."""

    async def run(client: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(client, *args, **kwargs)

    return _documented(blocking(run), method)


def promising(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, asyncio.Future[T]]],
) -> Callable[Concatenate[Any, P], concurrent.futures.Future[T]]:
    """Make a method of one that returns a promise: threads can wait for the promise.

    Returns at once, unless so many promises are not kept yet that the caller has to wait.
    """

    async def fulfil(client: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await (await method(client, *args, **kwargs))

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        thread = self._running()
        thread.require_other()
        self._places.acquire()
        promise: concurrent.futures.Future[T] = concurrent.futures.Future()
        promise.set_running_or_notify_cancel()
        self._promises.add(promise)
        promise.add_done_callback(self._kept)
        context = contextvars.copy_context()
        try:
            thread.post(
                lambda: thread.start(fulfil(self._client, *args, **kwargs), promise, context)
            )
        except NotRunning as error:
            promise.set_exception(error)
        return promise

    return _documented(call, method)


def _documented(call: T, method: Callable[..., object]) -> T:
    """Give a method the name and text of the one it wraps, for readers who need not wait."""
    text = (method.__doc__ or "").replace("async with", "with").replace("await ", "")
    for name, value in (("__name__", method.__name__), ("__doc__", text)):
        setattr(call, name, value)
    return call


# --- the clients ----------------------------------------------------------------------------------


class Producer(Blocking[producer.Producer]):
    """Sends messages to a cluster; threads may share one.

    ::

        with Producer("orders-producer", nameserver="127.0.0.1:9876") as producer:
            receipt = producer.send(Message("orders", b"hello", tags="created"))
    """

    @built_by(producer.Producer)
    def __init__(self) -> None: ...

    send = blocking(producer.Producer.send)
    send_batch = blocking(producer.Producer.send_batch)
    send_oneway = blocking(producer.Producer.send_oneway)
    submit = promising(producer.Producer.submit)
    request = blocking(producer.Producer.request)
    reply = blocking(producer.Producer.reply)
    queues = blocking(producer.Producer.queues)


class PullConsumer(Blocking[pull_consumer.PullConsumer]):
    """Reads queues where and when the application wants; threads may share one.

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
    """Reads topics, sharing their queues with its group, or queues that are assigned by hand.

    One thread polls or iterates, as asking for more says that the messages before are done with.

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


class PushConsumer(Blocking[push_consumer.PushConsumer]):
    """Gives every message of some topics to a listener, at least once.

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

    wait = blocking(push_consumer.PushConsumer.wait)
    subscribe = blocking(push_consumer.PushConsumer.subscribe)
    unsubscribe = blocking(push_consumer.PushConsumer.unsubscribe)
    suspend = on_loop(push_consumer.PushConsumer.suspend)
    resume = on_loop(push_consumer.PushConsumer.resume)
    resize = on_loop(push_consumer.PushConsumer.resize)
    assignment = on_loop(push_consumer.PushConsumer.assignment)
    commit = blocking(push_consumer.PushConsumer.commit)
