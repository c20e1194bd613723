"""Filter servers in virtual time, whose filters run in the test's own process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest.mock import patch

from turbopump.broker.filter_servers import FilterServerProcesses
from turbopump.filter_server.sandbox import FilterRefused, FilterStopped, Sandbox, Verdicts
from turbopump.filter_server.server import FilterServer
from turbopump.filters.server_config import CodeLimits, FilterServerConfig
from turbopump.testing import MemoryNetwork, virtual_loop
from turbopump.wire.record import MessageView

HOST = "10.0.0.7"


class PlainSandbox:
    """Decides like a sandbox, but without a process; for filters that the test itself defines."""

    started = 0
    batch_count = 64

    def __init__(self, matches: Callable[[MessageView], bool]) -> None:
        self._matches = matches
        self.is_running = True

    @classmethod
    async def start(cls, source: bytes, limits: CodeLimits) -> PlainSandbox:
        cls.started += 1
        names: dict[str, Any] = {"clock": virtual_loop().clock}
        try:
            exec(source, names)
        except MemoryError as error:
            raise FilterStopped("it needs more memory") from error
        except Exception as error:
            raise FilterRefused(str(error)) from error
        return cls(names["matches"])

    async def decide(self, messages: Sequence[MessageView]) -> Verdicts:
        matched: list[bool] = []
        for message in messages:
            try:
                matched.append(self._matches(message))
            except MemoryError as error:
                self.is_running = False
                raise FilterStopped("it needs more memory") from error
            except Exception as error:  # noqa: BLE001 - as a sandbox reports it
                return Verdicts(matched, repr(error))
        return Verdicts(matched)

    async def check_idle(self) -> None:
        """Do nothing: filters in the test's own process are never idle."""

    async def close(self) -> None:
        self.is_running = False


@contextmanager
def plain_filters() -> Iterator[None]:
    """Keep brokers from starting processes, and run filters in the filter server's own process."""
    with (
        patch.object(Sandbox, "start", PlainSandbox.start),
        patch.object(FilterServerProcesses, "start", lambda *_: None),
    ):
        yield


@asynccontextmanager
async def filter_server(
    network: MemoryNetwork, broker: str, host: str = HOST, port: int = 0, **limits: Any
) -> AsyncIterator[FilterServer]:
    config = FilterServerConfig(
        broker=broker,
        bind_host=host,
        advertised_host=host,
        port=port,
        limits=CodeLimits(**limits),
    )
    async with FilterServer(config, network.host(host), virtual_loop().clock) as server:
        yield server
