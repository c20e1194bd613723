"""The tables that slaves copy: topics, groups, offsets, delay progress and SQL92 subscriptions.

An Apache slave requests whole tables. A Turbopump slave says which version it has, gets nothing if
that is the newest, and may have the request held until there is a newer one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from zlib import crc32

import msgspec
from msgspec import Struct

from turbopump.broker.consumer_filters import ConsumerFilters
from turbopump.broker.groups import Groups
from turbopump.broker.handlers.common import Requests
from turbopump.broker.offsets import Offsets
from turbopump.broker.replication.mastership import Mastership
from turbopump.broker.topics import Topics
from turbopump.net.connection import Connection
from turbopump.net.router import Handler, Outcome
from turbopump.store.store import Store
from turbopump.tables import Table
from turbopump.wire import headers
from turbopump.wire.bodies import TopicConfigTable, TopicTableCopy
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.schema import Header

HOLD_MAX_MS = 30_000


class ServedTable(Struct, frozen=True, kw_only=True):
    """One table."""

    version: Callable[[], str]
    """Changes whenever the table does; without encoding it, which may take long."""
    encoded: Callable[[], bytes]
    encoded_for_java: Callable[[], bytes] | None = None
    """If it differs; None if it is the same."""
    java_header: Header | None = None
    changing: Table | None = None
    """Reports changes, so that a request can be held until there is one."""


class CopiedTables(Requests):
    """Serves slaves, ours and Apache's, and tools."""

    def __init__(
        self,
        *,
        topics: Topics,
        groups: Groups,
        offsets: Offsets,
        consumer_filters: ConsumerFilters,
        delays: Callable[[], bytes],
        delays_for_java: Callable[[], bytes],
        store: Store,
        mastership: Mastership,
    ) -> None:
        self._store = store
        self._mastership = mastership
        self._is_closed = False
        self._tables = {
            RequestCode.GET_ALL_TOPIC_CONFIG: ServedTable(
                version=lambda: _version_text(topics.saving),
                encoded=lambda: msgspec.json.encode(_copy_of(topics.snapshot, store)),
                encoded_for_java=lambda: msgspec.json.encode(topics.snapshot),
                java_header=headers.NoFields(),
                changing=topics.saving,
            ),
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: ServedTable(
                version=lambda: _version_text(groups.saving),
                encoded=lambda: msgspec.json.encode(groups.snapshot),
                changing=groups.saving,
            ),
            RequestCode.GET_ALL_CONSUMER_OFFSET: ServedTable(
                version=lambda: _version_text(offsets.saving),
                encoded=offsets.encoded,
            ),
            RequestCode.GET_ALL_DELAY_OFFSET: ServedTable(
                version=lambda: str(crc32(delays())),
                encoded=delays,
                encoded_for_java=delays_for_java,
            ),
            RequestCode.GET_ALL_CONSUMER_FILTERS: ServedTable(
                version=lambda: _version_text(consumer_filters.saving),
                encoded=consumer_filters.encoded,
            ),
        }

    def handlers(self) -> dict[int, Handler]:
        return {code: partial(self._serve, table) for code, table in self._tables.items()}

    def close(self) -> None:
        """Answer the held requests, and hold no further ones."""
        self._is_closed = True
        for table in self._tables.values():
            if table.changing is not None:
                table.changing.wake_waiters()

    def _serve(self, table: ServedTable, request: Command, _peer: Connection) -> Outcome:
        asked = headers.TableCopy.from_ext_fields(request.ext_fields)
        if asked.known_version is None:
            body = (table.encoded_for_java or table.encoded)()
            return request.answer(ResponseCode.SUCCESS, table.java_header, body=body)
        self._mastership.note_slave(asked.slave_id)
        wait_ms = min(asked.wait_millis or 0, HOLD_MAX_MS)
        is_known = asked.known_version == table.version()
        if is_known and wait_ms > 0 and table.changing is not None and not self._is_closed:
            return self._held(table, table.changing, wait_ms, request, asked.known_version)
        return self._versioned(table, request, asked.known_version)

    async def _held(
        self, table: ServedTable, changing: Table, wait_ms: int, request: Command, known: str
    ) -> Command:
        # It may have changed since the request was read, one loop iteration ago.
        if table.version() == known:
            await changing.wait_changed(wait_ms)
        return self._versioned(table, request, known)

    def _versioned(self, table: ServedTable, request: Command, known: str) -> Command:
        version = table.version()
        header = headers.TableCopyAnswer(
            table_version=version,
            log_end=self._store.written_end,
            broker_epoch=self._mastership.record.epoch,
            slave_ids=self._mastership.slave_ids,
            broker_role=self._mastership.role.value,
        )
        body = b"" if version == known else table.encoded()
        return request.answer(ResponseCode.SUCCESS, header, body=body)


def _copy_of(table: TopicConfigTable, store: Store) -> TopicTableCopy:
    ends = ((name, store.removed_end(name)) for name in table.topic_config_table)
    return TopicTableCopy(
        data_version=table.data_version,
        topic_config_table=table.topic_config_table,
        removed_ends={name: end for name, end in ends if end},
    )


def _version_text(table: Table) -> str:
    return f"{table.version.timestamp}-{table.version.counter}"
