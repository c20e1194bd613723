"""Running decorated functions: a consumer per group, and a producer for their results."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from turbopump.client.arguments import checked_hooks
from turbopump.client.config import ClientConfig
from turbopump.client.delivery.listener import ConsumeHook, Listen
from turbopump.client.delivery.results import (
    Answer,
    ConsumeContext,
    ConsumeResult,
    GiveUp,
    is_failure,
)
from turbopump.client.filter_hooks import FilterHook
from turbopump.client.handlers import Handler, HandlerGroup, grouped
from turbopump.client.life_cycle import ServingLifeCycle
from turbopump.client.producer import Producer
from turbopump.client.push_config import concurrency_limits
from turbopump.client.push_consumer import PushConsumer
from turbopump.client.send_hooks import SendHook
from turbopump.client.shared_sessions import client_config
from turbopump.errors import ClientError
from turbopump.machine.threads import DaemonThreads
from turbopump.wire.record import MessageView

if TYPE_CHECKING:
    from turbopump.client.blocking import WorkersProducer

_log = logging.getLogger(__name__)


class Worker(ServingLifeCycle):
    """Consumes with functions decorated with `turbopump.consumer`.

    ::

        async with Worker(bill, ship, nameserver="127.0.0.1:9876") as worker:
            await worker.wait()
    """

    def __init__(
        self,
        *handlers: Handler[..., Any],
        nameserver: str | Sequence[str] = "",
        namespace: str = "",
        client: ClientConfig | None = None,
        hooks: Sequence[ConsumeHook | FilterHook] = (),
        send_hooks: Sequence[SendHook] = (),
    ) -> None:
        super().__init__()
        self._groups = grouped(handlers)
        self._hooks = checked_hooks(
            "hooks", hooks, "before_consume", "after_consume", instead="keeps"
        )
        self._send_hooks = checked_hooks("send_hooks", send_hooks, "before_send", "after_send")
        self._threads_max = sum(
            concurrency_limits(group.settings.concurrency)[1] for group in self._groups
        )
        self._threads: DaemonThreads | None = None
        """Runs plain functions while the worker runs; results are published on the loop."""
        self._blocking_producer: WorkersProducer | None = None
        """The producer for functions in threads, while the worker runs."""
        self._use(client_config(nameserver, namespace, client, None))

    def _use(self, config: ClientConfig) -> None:
        self._config = config
        self._producer = Producer(self._groups[0].group, client=config, hooks=self._send_hooks)
        self._consumers = [
            PushConsumer(
                group.group,
                self._listener(group),
                subscriptions={topic: each.tags for topic, each in group.by_topic.items()},
                start_from=group.settings.start_from,
                orderly=group.settings.orderly,
                concurrency=group.settings.concurrency,
                max_attempts=group.settings.max_attempts,
                listening=group.settings.listening,
                offset_store=group.settings.offset_store,
                hooks=self._hooks,
                client=config,
            )
            for group in self._groups
        ]

    @property
    def groups(self) -> list[str]:
        """The consumer groups of the functions."""
        return [group.group for group in self._groups]

    def connect_to(self, nameserver: str | Sequence[str]) -> None:
        """Replace the name servers given to the constructor; only before the start.

        ::

            worker.connect_to("10.0.0.1:9876;10.0.0.2:9876")
        """
        if self._threads is not None:
            raise ClientError("this Worker is running: call connect_to() before start()")
        self._use(dataclasses.replace(self._config, nameserver=nameserver))

    # --- life cycle -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the groups and start consuming."""
        if self._threads is not None:
            return
        self._closed = asyncio.Event()
        threads = self._threads = DaemonThreads(self._threads_max, "turbopump-function")
        try:
            await self._producer.start()
            self._blocking_producer = _blocking(self._producer)
            for consumer in self._consumers:
                await consumer.start()
                if self._threads is not threads or self._closing is not None:
                    # One of the functions has closed the worker, but not this consumer.
                    await consumer.close()
                    return
        except BaseException:
            await self._close()
            self._closed = None
            raise

    def begin_closing(self) -> asyncio.Task[None] | None:
        if self._threads is not None and self._closing is None:
            self._closing = asyncio.create_task(self._close())
        return self._closing

    @property
    def is_calling(self) -> bool:
        return any(consumer.is_calling for consumer in self._consumers)

    async def _close(self) -> None:
        assert self._closed is not None, "created by start"
        closing = [consumer.begin_closing() for consumer in self._consumers]
        try:
            # The producer last: running functions may still return messages to publish.
            await asyncio.gather(*(each for each in closing if each is not None))
        finally:
            await self._producer.close()
            if self._blocking_producer is not None:
                self._blocking_producer.leave()
            if self._threads is not None:
                self._threads.shutdown(wait=False)
            self._threads = self._closing = self._blocking_producer = None
            self._closed.set()

    # --- calling ----------------------------------------------------------------------------------

    def _listener(self, group: HandlerGroup) -> Listen:
        async def listen(messages: list[MessageView], context: ConsumeContext) -> Answer:
            (message,) = messages
            handler = group.by_topic[message.topic]
            arguments = _decoded(handler, message, context)
            if arguments is None:
                return GiveUp()
            if handler.producer_parameter is not None:
                producer = self._producer if handler.awaits else self._blocking_producer
                arguments[handler.producer_parameter] = producer
            try:
                returned = await self._called(handler, arguments)
            except Exception as error:
                if (outcome := handler.retries.after(error)) is not None:
                    context.accept(outcome)
                raise
            if isinstance(returned, Answer):
                return returned
            for result, to in handler.results(returned):
                await self._producer.send(result, to=to)
            return ConsumeResult.SUCCESS

        return listen

    async def _called(self, handler: Handler[..., Any], arguments: dict[str, Any]) -> object:
        """Call a function: on the loop if it is async, in a thread otherwise."""
        call = functools.partial(handler.function, **arguments)
        if handler.is_async:
            returned = await call()
        else:
            in_context = functools.partial(contextvars.copy_context().run, _collected, call)
            returned = await asyncio.get_running_loop().run_in_executor(self._threads, in_context)
        if inspect.isawaitable(returned):
            # Of a plain decorator around an async function, for example.
            returned = await returned
        if isinstance(returned, AsyncIterator):
            return [each async for each in returned]
        return _run_to_end(returned)


def _blocking(producer: Producer) -> WorkersProducer:
    from turbopump.client.blocking import WorkersProducer  # It imports this module.

    return WorkersProducer(producer)


def _collected(call: Callable[[], object]) -> object:
    """Call a function; run a generator to its end here, before anything is published."""
    try:
        return _run_to_end(call())
    except StopIteration as error:
        # A future cannot carry it: the loop would wait for this call forever.
        raise RuntimeError("the function raised StopIteration") from error


def _run_to_end(returned: object) -> object:
    """Return the items of a generator; or, if it returns a failure at its end, only that."""
    if not isinstance(returned, Iterator):
        return returned
    items = []
    while True:
        try:
            items.append(next(returned))
        except StopIteration as end:
            return end.value if is_failure(end.value) else items


def _decoded(
    handler: Handler[..., Any], message: MessageView, context: ConsumeContext
) -> dict[str, Any] | None:
    """Return a function's arguments; None if the body does not fit, which a retry cannot change."""
    try:
        return handler.arguments(message, context)
    except (ValueError, msgspec.MsgspecError) as error:
        _log.error(
            "message %s of topic %s does not fit %r, made a dead letter: %s",
            message.message_id,
            message.topic,
            handler,
            error,
        )
        return None
