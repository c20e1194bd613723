"""A slave's copies of its master's tables: topics, groups, offsets, delay progress, filters.

Each table is copied every 10 s. A Turbopump master holds the requests for topics and groups until
they change, so that changes arrive immediately; an Apache master answers each time with everything.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from zlib import crc32

from msgspec import Struct

from turbopump.broker.consumer_filters import ConsumerFilterTable
from turbopump.broker.delay_recovery import SavedDelays
from turbopump.broker.delays import Delays
from turbopump.broker.replication.claims import Ask
from turbopump.broker.state import State
from turbopump.errors import BodyError, NetworkError, RemoteError, WireError
from turbopump.machine.timers import set_within
from turbopump.message import PhysicalOffset
from turbopump.store.store import Store
from turbopump.supervisor import Supervisor
from turbopump.wire import headers
from turbopump.wire.bodies import (
    ConsumerOffsets,
    GroupConfigTable,
    KeyValues,
    TopicTableCopy,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body

_log = logging.getLogger(__name__)

COPY_INTERVAL_MS = 10_000
RETRY_MS = 3000
"""Retry interval when a master does not answer."""

LOG_WAIT_MS = 60_000
"""How long a copied table waits for the log that it refers to."""

_TIMEOUT_MS = 3000
_LOG_POLL_MS = 100


class Copy(Struct, frozen=True):
    """What a master answered."""

    body: bytes
    """Empty if the table is unchanged."""
    about: headers.TableCopyAnswer = headers.TableCopyAnswer(
        table_version="", log_end=0, broker_epoch=0
    )
    """Without a version, and with zeros, if the master is not a Turbopump broker."""


class CopiedTable(Struct, frozen=True, kw_only=True):
    """One table of a slave."""

    what: str
    code: int
    adopt: Callable[[Copy], None]
    """Takes over the master's table; raises WireError if it cannot be read."""
    is_watched: bool = False
    """Whether the master is asked to hold the request until the table changes."""
    follows_log: bool = False
    """Whether it refers to messages: it counts only when the slave's log holds them too. Otherwise
    a delay level whose copies have not arrived yet would never be delivered after a promotion, and
    offsets would lie beyond the ends of their queues."""
    is_optional: bool = False
    """Whether a master may not know the request, as Apache's does not know ours."""


async def fetch(
    ask: Ask, master: str, table: CopiedTable, known_version: str, slave_id: int
) -> Copy:
    """Ask a master once for a table; raises RemoteError, NetworkError or WireError."""
    wait_ms = COPY_INTERVAL_MS if table.is_watched and known_version else 0
    header = headers.TableCopy(known_version=known_version, wait_millis=wait_ms, slave_id=slave_id)
    answer = await ask(master, request(table.code, header), wait_ms + _TIMEOUT_MS)
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED and table.is_optional:
        return Copy(b"")
    if answer.code != ResponseCode.SUCCESS:
        raise RemoteError(answer.code, answer.remark or "")
    if "tableVersion" not in (answer.ext_fields or {}):
        return Copy(whole_body(answer))
    return Copy(whole_body(answer), headers.TableCopyAnswer.from_ext_fields(answer.ext_fields))


@dataclass(eq=False)
class TableCopies:
    """Keeps a slave's tables equal to its master's; `start` once, `follow` each new address."""

    tables: Sequence[CopiedTable]
    ask: Ask
    log_end: Callable[[], int]
    slave_id: int
    on_answer: Callable[[Copy], None] = lambda _: None

    def __post_init__(self) -> None:
        self.master = ""
        """Where tables are copied from; empty if unknown."""
        self._has_moved = asyncio.Event()
        self._failing: set[str] = set()
        self.versions: dict[str, str] = {}
        """By table, the version that was adopted last."""

    def start(self, work: Supervisor) -> None:
        """Copy all tables from now on, until the work is stopped."""
        for table in self.tables:
            work.keep(f"copy of {table.what}", partial(self._run, table))

    def follow(self, master: str) -> None:
        """Copy from this address, given as ``host:port`` of the broker."""
        if master != self.master:
            self.master = master
            self.versions.clear()
            self._has_moved.set()
            self._has_moved = asyncio.Event()

    async def _run(self, table: CopiedTable) -> None:
        while True:
            has_moved = self._has_moved
            pause_ms = await self._copied(table) if self.master else COPY_INTERVAL_MS
            if pause_ms and not has_moved.is_set():
                await set_within(has_moved, pause_ms)

    async def _copied(self, table: CopiedTable) -> int:
        """Copy a table once, even if that fails; return how long to wait before the next copy."""
        try:
            is_held = await self.copy_once(table)
        except (RemoteError, NetworkError, WireError) as error:
            if table.what not in self._failing:
                _log.warning(
                    "%s are not copied from master %s, tried again every %d s: %s",
                    table.what,
                    self.master,
                    RETRY_MS // 1000,
                    error,
                )
            self._failing.add(table.what)
            return RETRY_MS
        if table.what in self._failing:
            self._failing.discard(table.what)
            _log.info("%s are copied from master %s again", table.what, self.master)
        return 0 if is_held else COPY_INTERVAL_MS

    async def copy_once(self, table: CopiedTable) -> bool:
        """Copy a table if it has changed; return whether the master holds requests for it.

        Raises RemoteError, NetworkError or WireError.
        """
        master, known = self.master, self.versions.get(table.what, "")
        copy = await fetch(self.ask, master, table, known, self.slave_id)
        if copy.about.table_version:
            self.on_answer(copy)
        version = copy.about.table_version or f"crc {crc32(copy.body)}"
        is_new = bool(copy.body) and version != known
        if is_new and table.follows_log:
            is_new = await self._log_reaches(copy.about.log_end)
        if is_new and master == self.master:
            table.adopt(copy)
            self.versions[table.what] = version
        return table.is_watched and bool(copy.about.table_version)

    async def _log_reaches(self, log_end: int) -> bool:
        """Wait until this slave has the log that a table refers to; False on timeout."""
        has_moved = self._has_moved
        for _ in range(LOG_WAIT_MS // _LOG_POLL_MS):
            if self.log_end() >= log_end:
                return True
            if await set_within(has_moved, _LOG_POLL_MS):
                break
        return False


def copied_tables(
    state: State,
    delays: Delays,
    store: Store,
    master_begins_at: Callable[[PhysicalOffset], None],
) -> tuple[CopiedTable, ...]:
    """Return the tables of a slave, to be copied from its master."""
    topics, groups, offsets = state.topics, state.groups, state.offsets

    def adopt_topics(copy: Copy) -> None:
        # An Apache master does not say where its log ended then.
        end = PhysicalOffset(copy.about.log_end) if copy.about.table_version else None
        table = TopicTableCopy.decode(copy.body)
        for name in topics.adopt_copy(table):
            _log.info("topic %s was deleted on the master: its queues are deleted here too", name)
            store.remove_topic(name, end)
        for name, position in table.removed_ends.items():
            removed_end = PhysicalOffset(min(position, copy.about.log_end))
            if name in topics.table and store.removed_end(name) < removed_end:
                # Created again meanwhile: its older messages must not return after a promotion.
                store.remove_topic(name, removed_end, is_deleted=True)

    return (
        CopiedTable(
            what="topics",
            code=RequestCode.GET_ALL_TOPIC_CONFIG,
            adopt=adopt_topics,
            is_watched=True,
        ),
        CopiedTable(
            what="groups",
            code=RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
            adopt=lambda copy: groups.adopt_copy(GroupConfigTable.decode(copy.body)),
            is_watched=True,
        ),
        CopiedTable(
            what="offsets",
            code=RequestCode.GET_ALL_CONSUMER_OFFSET,
            adopt=lambda copy: offsets.adopt_copy(ConsumerOffsets.decode(copy.body)),
            follows_log=True,
        ),
        CopiedTable(
            what="delay progress",
            code=RequestCode.GET_ALL_DELAY_OFFSET,
            adopt=lambda copy: delays.adopt_copy(SavedDelays.decode(copy.body)),
            follows_log=True,
        ),
        CopiedTable(
            what="consumer filters",
            code=RequestCode.GET_ALL_CONSUMER_FILTERS,
            adopt=lambda copy: state.consumer_filters.merge_copy(
                ConsumerFilterTable.decode(copy.body)
            ),
            is_optional=True,
        ),
        CopiedTable(
            what="figures of the log",
            code=RequestCode.GET_BROKER_RUNTIME_INFO,
            adopt=lambda copy: master_begins_at(log_begin(copy.body)),
        ),
    )


def log_begin(runtime_info: bytes) -> PhysicalOffset:
    """Return where a broker's log begins, as any broker reports it; raises WireError."""
    text = KeyValues.decode(runtime_info).table.get("commitLogMinOffset", "")
    # An Apache broker without a log reports -1.
    if not re.fullmatch(r"-1|[0-9]{1,18}", text):
        raise BodyError(f"commitLogMinOffset must be a position, got {text[:100]!r}")
    return PhysicalOffset(max(0, int(text)))
