"""Choosing the session of a new producer or consumer without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, ref

from turbopump.client.arguments import joined_addresses
from turbopump.client.config import ClientConfig
from turbopump.client.members import ConsumerMember, ProducerMember
from turbopump.client.session import Session
from turbopump.errors import InvalidArgument

_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[ClientConfig, list[ref[Session]]]] = (
    WeakKeyDictionary()
)
"""Members keep their sessions alive; a reference from here would keep the event loop alive too."""

SessionFactory = Callable[[ClientConfig], Session]

_factories: WeakKeyDictionary[asyncio.AbstractEventLoop, SessionFactory] = WeakKeyDictionary()


def create_sessions_with(create: SessionFactory) -> None:
    """Give clients that start in the running event loop another kind of session, as tests do."""
    _factories[asyncio.get_running_loop()] = create


def custom_session(config: ClientConfig) -> Session | None:
    """Return a new session of the running event loop's kind; None for ordinary ones."""
    create = _factories.get(asyncio.get_running_loop())
    return None if create is None else create(config)


def has_custom_sessions() -> bool:
    """Whether sessions of the running event loop are of another kind."""
    return asyncio.get_running_loop() in _factories


def client_config(
    nameserver: str | Sequence[str],
    namespace: str,
    client: ClientConfig | None,
    session: Session | None,
) -> ClientConfig:
    """Return the configuration of a new member, given in one of three ways."""
    ways = [bool(nameserver or namespace), client is not None, session is not None]
    if sum(ways) > 1:
        raise InvalidArgument(
            "pass one of nameserver (with namespace), client and session: each of them says where "
            "the cluster is"
        )
    if session is not None:
        return session.config
    if client is not None and not isinstance(client, ClientConfig):
        raise InvalidArgument(
            f"client must be a ClientConfig, got {client!r}; pass ClientConfig(nameserver)"
        )
    return client or ClientConfig(joined_addresses(nameserver), namespace)


def shared_session(config: ClientConfig, member: ProducerMember | ConsumerMember) -> Session:
    """Return a session of this event loop that the member can join, or a new one.

    Members with equal configurations share one, unless it already has the group: two consumers of
    one group must have different client ids, or each would take the other's queues for its own.
    With a user-defined instance name there is only one session, and joining it fails.
    """
    loop = asyncio.get_running_loop()
    by_config = _sessions.setdefault(loop, {})
    known = [session() for session in by_config.get(config, ())]
    sessions = [session for session in known if session is not None and session.is_running]
    for session in sessions:
        if config.instance or not session.members.expects(member):
            break
    else:
        session = custom_session(config) or Session(config)
        sessions.append(session)
    by_config[config] = [ref(each) for each in sessions]
    # Before the first await, or two members that start together would choose the same.
    session.members.expect(member)
    return session
