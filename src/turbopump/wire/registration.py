"""The compressed form of a broker's registration (103): lengths and texts in one zlib stream."""

from __future__ import annotations

import struct
import zlib

from turbopump.errors import BodyError, RecordError
from turbopump.wire import lenient_json
from turbopump.wire.bodies import BrokerRegistration, DataVersion, TopicConfig, TopicConfigTable
from turbopump.wire.compression import inflate
from turbopump.wire.sysflag import Compression

TOPICS_MAX = 100_000
"""Most topics of one broker."""

INFLATED_BYTES_MAX = 16 * 1024 * 1024
"""As large as an uncompressed registration may be; that is 160 bytes for each topic."""

_LEVEL = 9
_LENGTH = struct.Struct(">i")


def encode_compressed(registration: BrokerRegistration) -> bytes:
    """Return the compressed form; it cannot hold a topic's system flag and order."""
    table = registration.topic_config_serialize_wrapper
    topics = table.topic_config_table.values()
    servers = lenient_json.dumps(registration.filter_server_list)
    plain = b"".join(
        (
            _sized(table.data_version.encode()),
            _LENGTH.pack(len(topics)),
            *(_sized(_topic_line(topic).encode()) for topic in topics),
            _sized(servers.encode()),
        )
    )
    return zlib.compress(plain, _LEVEL)


def decode_compressed(data: bytes) -> BrokerRegistration:
    return decode_inflated(inflate_registration(data))


def inflate_registration(data: bytes) -> bytes:
    """Return the decompressed bytes; raises BodyError also if they are too many."""
    try:
        return inflate(data, Compression.ZLIB, INFLATED_BYTES_MAX)
    except RecordError as error:
        raise BodyError(f"registration: {error.reason}") from error


def decode_inflated(data: bytes) -> BrokerRegistration:
    reader = _Reader(data)
    version = DataVersion.decode(reader.sized())
    count = reader.number()
    if count > TOPICS_MAX:
        raise BodyError(f"registration must have at most {TOPICS_MAX} topics, got {count}")
    topics = [_parse_topic_line(reader.sized()) for _ in range(count)]
    servers = lenient_json.loads(reader.sized()) or []
    if not isinstance(servers, list):
        raise BodyError("registration's filter servers are not a list")
    return BrokerRegistration(
        filter_server_list=[str(server) for server in servers],
        topic_config_serialize_wrapper=TopicConfigTable(
            data_version=version,
            topic_config_table={topic.topic_name: topic for topic in topics},
        ),
    )


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self) -> int:
        at, self._at = self._at, self._at + _LENGTH.size
        if self._at > len(self._data):
            raise BodyError("registration ends before a length", at)
        value: int = _LENGTH.unpack_from(self._data, at)[0]
        if value < 0:
            raise BodyError(f"registration has a length of {value}", at)
        return value

    def sized(self) -> bytes:
        length = self.number()
        at, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise BodyError(f"registration ends inside a text of {length} bytes", at)
        return self._data[at : self._at]


def _sized(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _topic_line(topic: TopicConfig) -> str:
    return (
        f"{topic.topic_name} {topic.read_queue_nums} {topic.write_queue_nums}"
        f" {topic.perm} {topic.topic_filter_type}"
    )


def _parse_topic_line(line: bytes) -> TopicConfig:
    try:
        name, read, write, perm, filter_type = line.decode().split(" ")
        return TopicConfig(
            topic_name=name,
            read_queue_nums=int(read),
            write_queue_nums=int(write),
            perm=int(perm),
            topic_filter_type=filter_type,
        )
    except ValueError as error:
        raise BodyError(f"{line!r} is not a registered topic's line") from error
