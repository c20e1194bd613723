"""The life cycle of producers, consumers, workers and Admin: start, close, `async with`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self, TypeVar

from turbopump.client.members import ConsumerMember, ProducerMember
from turbopump.client.session import Session
from turbopump.errors import NotRunning

R = TypeVar("R")


class LifeCycle(ABC):
    """Starts and closes, explicitly or as a context manager."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@asynccontextmanager
async def started(session: Session, member: ProducerMember | ConsumerMember) -> AsyncIterator[None]:
    """Start a session for a member; after an error, leave and close it."""
    await session.start()
    try:
        yield
    except BaseException:
        await leave(session, member)
        raise


async def leave(session: Session, member: ProducerMember | ConsumerMember) -> None:
    """Leave a session, and close it even if brokers could not be notified."""
    try:
        await session.leave(member)
    finally:
        await session.close()


def require_running(running: R | None, kind: str, group: str) -> R:
    """Return the state between start and close; raises NotRunning."""
    if running is None:
        raise NotRunning(f"{kind} {group!r} is not running: use it inside `with`, or call start()")
    return running
