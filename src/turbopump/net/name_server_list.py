"""The addresses of name servers: configured, or fetched from URLs and kept up to date."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from turbopump.clock import Clock
from turbopump.errors import InvalidArgument, NoNameServer, TurbopumpError
from turbopump.machine.log_limit import LogLimit
from turbopump.machine.process import environment
from turbopump.net.http_get import check_url, http_get
from turbopump.net.network import Network
from turbopump.supervisor import Supervisor
from turbopump.wire.hosts import split_address

_log = logging.getLogger(__name__)

ADDRESSES_VARIABLE = "NAMESRV_ADDR"
DOMAIN_VARIABLE = "ROCKETMQ_NAMESRV_DOMAIN"
SUBGROUP_VARIABLE = "ROCKETMQ_NAMESRV_DOMAIN_SUBGROUP"
"""As ``rocketmq.namesrv.domain`` and ``rocketmq.namesrv.domain.subgroup`` of Java clients."""

DEFAULT_SUBGROUP = "nsaddr"

INTERVAL_MS = 120_000
RETRY_MS = 5000
"""How often a URL is fetched: once it has answered, and before."""

FETCH_TIMEOUT_MS = 3000

PAUSE_MS = 500
"""After a failure, callers get it again for this long, as a send that waits asks far more often."""

OnChange = Callable[[Collection[str]], Awaitable[None]]
"""Called with the addresses that are no longer in the list."""


def is_url(source: str) -> bool:
    """Whether name servers are found at a URL, instead of at this address."""
    return "://" in source


def check_source(source: str) -> None:
    """Raise InvalidArgument unless it is ``host:port`` or a URL."""
    if is_url(source):
        check_url(source)
    else:
        split_address(source)


def url_of_domain(domain: str, subgroup: str) -> str:
    """Return the URL of a domain and sub group, as Java clients and brokers build it.

    Raises InvalidArgument unless the domain is a host or ``host:port``.
    """
    host = domain if ":" in domain else f"{domain}:8080"
    split_address(host)
    return f"http://{host}/rocketmq/{subgroup}"


def nameserver_from_environment() -> str:
    """Return the addresses or the URL that the environment names; empty if it names none."""
    domain = environment(DOMAIN_VARIABLE)
    subgroup = environment(SUBGROUP_VARIABLE) or DEFAULT_SUBGROUP
    return environment(ADDRESSES_VARIABLE) or (url_of_domain(domain, subgroup) if domain else "")


def parse_addresses(text: str) -> tuple[str, ...]:
    """Return the addresses of a URL's answer, its first line; raises InvalidArgument."""
    line, *_ = text.strip().splitlines() or [""]
    addresses = tuple(dict.fromkeys(part.strip() for part in line.split(";") if part.strip()))
    if not addresses:
        raise InvalidArgument("the answer is empty, expected host:port;host:port")
    for address in addresses:
        split_address(address)
    return addresses


class NameServerList:
    """The current addresses of name servers, from ``host:port`` texts and URLs.

    URLs are fetched every two minutes from `start` on, and when addresses are needed while none
    are known. What a URL returned last counts until it returns other addresses.
    """

    def __init__(
        self,
        sources: Sequence[str],
        network: Network,
        clock: Clock,
        work: Supervisor,
        on_change: OnChange | None = None,
    ) -> None:
        self._sources = sources
        self._urls = tuple(dict.fromkeys(source for source in sources if is_url(source)))
        self._network = network
        self._work = work
        self.on_change = on_change
        self._clock = clock
        self._log_limit = LogLimit(clock)
        self._found: dict[str, tuple[str, ...]] = {}
        """By URL, what it returned last."""
        self._failure = ""
        self._failed_ms = -PAUSE_MS
        self._fetching: asyncio.Task[None] | None = None
        self.current: tuple[str, ...] = self._known()

    def start(self) -> None:
        """Fetch the URLs, if any, now and again until the work is stopped."""
        if self._urls:
            first_ms = INTERVAL_MS if self.is_complete else 0
            self._work.every(
                "name server addresses", self._pause_ms, self.refresh, first_ms=first_ms
            )

    def continue_from(self, before: NameServerList) -> None:
        """Take what an earlier list found."""
        self._found, self.current = before._found, before.current

    @property
    def is_complete(self) -> bool:
        """Whether all URLs have answered."""
        return len(self._found) == len(self._urls)

    async def addresses(self) -> tuple[str, ...]:
        """Return the current addresses, fetching them if none are known; raises NoNameServer."""
        is_paused = self._clock.monotonic_ms() - self._failed_ms < PAUSE_MS
        if not self.current and not is_paused:
            await self.refresh()
        if not self.current:
            raise NoNameServer(f"no name servers found: {self._failure}")
        return self.current

    async def refresh(self, timeout_ms: int | None = None) -> None:
        """Fetch the URLs now, or wait for the fetch that is running; failures are logged.

        The fetch continues after the timeout.
        """
        if self._fetching is None:
            self._fetching = self._work.start(self._fetch_all())
            self._fetching.add_done_callback(self._fetched)
        await asyncio.wait(
            [self._fetching], timeout=None if timeout_ms is None else timeout_ms / 1000
        )

    def _pause_ms(self) -> int:
        return INTERVAL_MS if self.is_complete else RETRY_MS

    def _fetched(self, _: asyncio.Task[None]) -> None:
        self._fetching = None

    async def _fetch_all(self) -> None:
        self._failure = "the client was closed meanwhile"
        for url in self._urls:
            try:
                text = await http_get(self._network, url, FETCH_TIMEOUT_MS)
                self._found[url] = parse_addresses(text)
            except TurbopumpError as error:
                self._failure = f"{url}: {error}"
                self._failed_ms = self._clock.monotonic_ms()
                self._log_failure(url)
        await self._take(self._known())

    def _log_failure(self, url: str) -> None:
        kept = ";".join(self._found.get(url, ()))
        then = f"keeping {kept}" if kept else f"retrying every {RETRY_MS // 1000} s"
        text = "name servers not found, %s: %s"
        self._log_limit.log(url, _log, logging.WARNING, text, then, self._failure)

    def _known(self) -> tuple[str, ...]:
        parts = (self._found.get(each, ()) if is_url(each) else (each,) for each in self._sources)
        return tuple(dict.fromkeys(address for part in parts for address in part))

    async def _take(self, addresses: tuple[str, ...]) -> None:
        before = self.current
        # In any order: they are equivalent.
        if set(before) == set(addresses):
            return
        self.current = addresses
        _log.info("name servers: %s; before: %s", ";".join(addresses), ";".join(before) or "none")
        if self.on_change is not None:
            await self.on_change([each for each in before if each not in addresses])
