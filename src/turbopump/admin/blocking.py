"""The same administration for programs without an event loop.

Every class wraps one of the asynchronous ones, method by method, as `turbopump.client.blocking`
does for producers and consumers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from turbopump.admin import (
    administration,
    cluster,
    configuration,
    dead_letters,
    groups,
    messages,
    offsets,
    topics,
    transactions,
)
from turbopump.client.blocking import Blocking, blocking, built_by, run_on
from turbopump.errors import NotRunning

C = TypeVar("C")
T = TypeVar("T")
P = ParamSpec("P")


class _Subject(Generic[C]):
    """One subject of an `Admin`; it runs when that does."""

    def __init__(self, find: Callable[[], C], running: Callable[[], Any]) -> None:
        # Looked up for each call: starting may replace it.
        self._find = find
        # Methods made by `blocking` ask for it.
        self._running = running

    @property
    def _client(self) -> C:
        return self._find()


def iterating(
    method: Callable[Concatenate[C, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Any, P], Generator[T, None, None]]:
    """Wrap a method that iterates asynchronously."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        source = _Source(method(self._client, *args, **kwargs))
        try:
            while True:
                try:
                    yield run_on(self._running(), source.next)
                except StopAsyncIteration:
                    return
        finally:
            # An exception may keep this alive until the admin is closed, and the source with it.
            with suppress(NotRunning):
                run_on(self._running(), source.close)

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call


class _Source(Generic[T]):
    """An asynchronous generator whose items are wanted one at a time."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        # A caller that stops waiting closes it while the next item is still being cancelled.
        self._in_use = asyncio.Lock()

    async def next(self) -> T:
        async with self._in_use:
            return await anext(self._items)

    async def close(self) -> None:
        async with self._in_use:
            await self._items.aclose()


class Clusters(_Subject[cluster.Clusters]):
    list = blocking(cluster.Clusters.list)
    status = blocking(cluster.Clusters.status)
    runtime_info = blocking(cluster.Clusters.runtime_info)
    wipe_write_permission = blocking(cluster.Clusters.wipe_write_permission)
    add_write_permission = blocking(cluster.Clusters.add_write_permission)
    promotable = blocking(cluster.Clusters.promotable)
    role_of_master = blocking(cluster.Clusters.role_of_master)
    promote = blocking(cluster.Clusters.promote)


class Topics(_Subject[topics.Topics]):
    names = blocking(topics.Topics.names)
    list = blocking(topics.Topics.list)
    create = blocking(topics.Topics.create)
    update = blocking(topics.Topics.update)
    delete = blocking(topics.Topics.delete)
    purge = blocking(topics.Topics.purge)
    route = blocking(topics.Topics.route)
    status = blocking(topics.Topics.status)
    queues_to_read = blocking(topics.Topics.queues_to_read)
    groups = blocking(topics.Topics.groups)


class Groups(_Subject[groups.Groups]):
    list = blocking(groups.Groups.list)
    settings = blocking(groups.Groups.settings)
    create = blocking(groups.Groups.create)
    update = blocking(groups.Groups.update)
    delete = blocking(groups.Groups.delete)
    require = blocking(groups.Groups.require)
    require_stopped = blocking(groups.Groups.require_stopped)
    progress = blocking(groups.Groups.progress)
    members = blocking(groups.Groups.members)
    inspect = blocking(groups.Groups.inspect)
    producers = blocking(groups.Groups.producers)


class Offsets(_Subject[offsets.Offsets]):
    plan = blocking(offsets.Offsets.plan)
    apply = blocking(offsets.Offsets.apply)
    reset = blocking(offsets.Offsets.reset)
    skip = blocking(offsets.Offsets.skip)
    plan_clone = blocking(offsets.Offsets.plan_clone)
    clone = blocking(offsets.Offsets.clone)


class Messages(_Subject[messages.Messages]):
    send = blocking(messages.Messages.send)
    consume = blocking(messages.Messages.consume)
    find = blocking(messages.Messages.find)
    by_offset_id = blocking(messages.Messages.by_offset_id)
    by_unique_key = blocking(messages.Messages.by_unique_key)
    by_unique_key_at = blocking(messages.Messages.by_unique_key_at)
    by_key = blocking(messages.Messages.by_key)
    by_key_at = blocking(messages.Messages.by_key_at)
    at = blocking(messages.Messages.at)
    span = blocking(messages.Messages.span)
    read = iterating(messages.Messages.read)
    tail = iterating(messages.Messages.tail)


class DeadLetters(_Subject[dead_letters.DeadLetters]):
    span = blocking(dead_letters.DeadLetters.span)
    list = iterating(dead_letters.DeadLetters.list)
    show = blocking(dead_letters.DeadLetters.show)
    redrive = iterating(dead_letters.DeadLetters.redrive)
    delete = blocking(dead_letters.DeadLetters.delete)
    is_redriven = blocking(dead_letters.DeadLetters.is_redriven)


class Transactions(_Subject[transactions.Transactions]):
    list = iterating(transactions.Transactions.list)
    find = blocking(transactions.Transactions.find)
    resume = blocking(transactions.Transactions.resume)


class Configuration(_Subject[configuration.Configuration]):
    broker = blocking(configuration.Configuration.broker)
    name_servers = blocking(configuration.Configuration.name_servers)
    change_brokers = blocking(configuration.Configuration.change_brokers)
    change_name_servers = blocking(configuration.Configuration.change_name_servers)
    key_values = blocking(configuration.Configuration.key_values)
    key_value = blocking(configuration.Configuration.key_value)
    put_key_value = blocking(configuration.Configuration.put_key_value)
    delete_key_value = blocking(configuration.Configuration.delete_key_value)


class Admin(Blocking[administration.Admin]):
    """Administers all clusters that some name servers know; threads may share one.

    ::

        with Admin("127.0.0.1:9876") as admin:
            admin.topics.create("orders", queues=8)
            print(admin.groups.progress("billing").lag)
    """

    @built_by(administration.Admin)
    def __init__(self) -> None: ...

    @property
    def clusters(self) -> Clusters:
        return Clusters(lambda: self._client.clusters, self._running)

    @property
    def topics(self) -> Topics:
        return Topics(lambda: self._client.topics, self._running)

    @property
    def groups(self) -> Groups:
        return Groups(lambda: self._client.groups, self._running)

    @property
    def offsets(self) -> Offsets:
        return Offsets(lambda: self._client.offsets, self._running)

    @property
    def messages(self) -> Messages:
        return Messages(lambda: self._client.messages, self._running)

    @property
    def dead_letters(self) -> DeadLetters:
        return DeadLetters(lambda: self._client.dead_letters, self._running)

    @property
    def transactions(self) -> Transactions:
        return Transactions(lambda: self._client.transactions, self._running)

    @property
    def configuration(self) -> Configuration:
        return Configuration(lambda: self._client.configuration, self._running)
