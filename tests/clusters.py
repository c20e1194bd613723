"""A name server and brokers in virtual time, and sessions of clients that use them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import brokers
from turbopump import testing
from turbopump.client.session import Session
from turbopump.net.request_protocol import RequestHook
from turbopump.testing import LinkQuality
from turbopump.wire.command import Command

BROKERS = ("a", "b")


@dataclass
class Recorder:
    """A hook that records requests, and may change or reject them."""

    requests: list[tuple[str, Command]] = field(default_factory=list)
    refuse: Callable[[str, Command], None] | None = None

    def before_request(self, address: str, command: Command) -> Command:
        self.requests.append((address, command))
        if self.refuse is not None:
            self.refuse(address, command)
        return command

    def after_response(self, address: str, request: Command, response: Command) -> None:
        pass

    def of(self, code: int) -> list[Command]:
        return [command for _, command in self.requests if command.code == code]

    def addresses_of(self, code: int) -> list[str]:
        return [address for address, command in self.requests if command.code == code]


class Cluster(testing.Cluster):
    """A cluster over links that randomly cut and delay, with clients on a known host."""

    def session(
        self,
        host: str = "10.0.1.1",
        hooks: Sequence[RequestHook] = (),
        kind: type[Session] = Session,
        **changes: Any,
    ) -> Session:
        return super().session(host, hooks, kind, **changes)


@asynccontextmanager
async def cluster(
    directory: Path, names: Sequence[str] = BROKERS[:1], nameservers: int = 1, **settings: Any
) -> AsyncIterator[Cluster]:
    """Run name servers and brokers; ``settings`` replace sections of the brokers' configuration."""
    config = brokers.config_at(directory, **settings)
    async with Cluster(
        directory,
        names,
        nameservers=nameservers,
        config=config,
        quality=LinkQuality(),
        skips_idle_time=False,
    ) as made:
        yield made
