"""Stores records that cannot be decoded in a dead-letter topic, from the executors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from zlib import crc32

from turbopump.admin.administration import Admin
from turbopump.client import calls
from turbopump.client.concurrent_calls import gather_by_key
from turbopump.client.config import ClientConfig
from turbopump.client.message_sender import unique_ids
from turbopump.client.names import INNER_PRODUCER_GROUP, with_namespace
from turbopump.client.outgoing import Outgoing
from turbopump.client.session import Session
from turbopump.errors import AlreadyThere, NoRoute, NotThere, SparkError, TurbopumpError
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.retry import with_retries
from turbopump.spark.records.bad_records import BadRecord, OnBadRecord
from turbopump.spark.shared_session import shared_session
from turbopump.wire import properties
from turbopump.wire.names import dead_letter_topic

DECODE_ERROR = "DECODE_ERROR"
ORIGIN_PROPERTIES = ("ORIGIN_TOPIC", "ORIGIN_BROKER", "ORIGIN_QUEUE_ID", "ORIGIN_QUEUE_OFFSET")
"""Property names that describe a dead letter's record. Without a retry topic, no redrive."""

_CONCURRENT_MAX = 16


@dataclass(frozen=True, slots=True)
class DeadLetterTopic:
    """Stores raw records in a topic, each once; a value that is sent to executors."""

    client: ClientConfig
    topic: str
    """As brokers know it, with its namespace."""
    is_of_group: bool
    """Created with one queue if it does not exist, as brokers do."""
    retries: int

    @classmethod
    def of(cls, options: SourceOptions) -> DeadLetterTopic | None:
        """Return the topic for bad records, or None if they do not go to one."""
        if options.on_bad_record is not OnBadRecord.DEAD_LETTER:
            return None
        name = options.dead_letter_topic or dead_letter_topic(options.reader_group)
        topic = with_namespace(options.client.namespace, name)
        is_of_group = options.dead_letter_topic is None
        return cls(options.client, topic, is_of_group, options.pulling.retries)

    def __call__(self, records: Sequence[BadRecord]) -> None:
        """Return when brokers have stored all of them; raises SparkError."""
        shared_session(self.client).run(lambda session: self._store_all(session, records))

    async def _store_all(self, session: Session, records: Sequence[BadRecord]) -> None:
        admin = Admin(session=session)
        if self.is_of_group and self.topic not in await admin.topics.names():
            with suppress(AlreadyThere):
                await admin.topics.create(self.topic, queues=1, brokers=[records[0].broker])
        await gather_by_key(
            records, lambda record: self._store(session, admin, record), _CONCURRENT_MAX
        )

    async def _store(self, session: Session, admin: Admin, record: BadRecord) -> None:
        try:
            await with_retries(
                lambda: self._store_once(session, admin, record), self.retries, record
            )
        except TurbopumpError as error:
            raise SparkError(
                f"{record}; it could not be stored in dead-letter topic {self.topic!r}: {error}; "
                "fix the topic, or set onBadRecord to null or skip"
            ) from error

    async def _store_once(self, session: Session, admin: Admin, record: BadRecord) -> None:
        """Send a record, unless an earlier attempt of this task or batch has stored it."""
        key = letter_key(record)
        with suppress(NotThere):
            nodes = await admin.topics.nodes_of(self.topic)
            if await admin.messages.by_key_at(nodes, self.topic, key, count_max=1):
                return
        route = await session.route_to_send(self.topic, 1)
        if not route.writable:
            raise NoRoute(f"topic {self.topic!r} has no queue to send to")
        queue = session.random.choice(route.writable)
        letter = self._letter(record, key, unique_ids(session).next())
        header = letter.header(INNER_PRODUCER_GROUP, queue, session.clock.now_ms(), 1)
        address = session.address_to_write(queue.broker)
        timeout_ms = self.client.request_timeout_ms
        await calls.send(session, address, header, letter.body, timeout_ms)

    def _letter(self, record: BadRecord, key: str, message_id: str) -> Outgoing:
        origin = (record.topic, record.broker, str(record.queue_id), str(record.offset))
        named = {
            **dict(zip(ORIGIN_PROPERTIES, origin, strict=True)),
            DECODE_ERROR: record.reason,
            properties.KEYS: key,
            properties.UNIQUE_KEY: message_id,
            properties.WAIT: "true",
        }
        return Outgoing(self.topic, message_id, record.raw, properties.encode(named), 0, 0)


def letter_key(record: BadRecord) -> str:
    """Return the key that identifies the dead letter of a record.

    Includes a checksum: a re-created topic has other records at the same offsets.
    """
    place = f"{record.topic}:{record.broker}:{record.queue_id}:{record.offset}"
    return f"{place}:{crc32(record.raw):08x}"
