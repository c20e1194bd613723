"""Options for writing to topics, and their checks before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turbopump.client.config import ClientConfig
from turbopump.client.names import check_group, check_topic_for_sending, with_namespace
from turbopump.client.outgoing import MessageRules
from turbopump.client.producer_config import ProducerConfig
from turbopump.errors import InvalidArgument
from turbopump.net.name_server_list import nameserver_from_environment
from turbopump.settings import check_settings, configured, described, keys_of, setting
from turbopump.spark.option_hints import SINK_HINTS
from turbopump.spark.option_values import duration_ms, size_bytes, with_hint
from turbopump.wire.sysflag import Compression

_OF_SPARK = frozenset({"checkpointlocation", "path", "queryname", "outputmode", "trigger"})
"""Options that Spark reads itself and also passes to every sink."""

_COMPRESSIONS = {one.name.lower(): one for one in Compression}
_CHOICES = {
    "stamp": ("true", "property", "false"),
    "reservedProperties": ("fail", "drop"),
    "compression": (*_COMPRESSIONS, "none"),
}
_WITH_UNITS = {
    "batchBytes": size_bytes,
    "sendTimeoutMs": duration_ms,
    "compressFromBytes": size_bytes,
    "bodyBytesMax": size_bytes,
}
"""Options with units as in the source, such as ``1m`` and ``5s``."""

_MOST = 2**31 - 1
"""For all numbers: the longest wait of one system call in ms, and the maximum frame size."""


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """How rows are sent; sent to the executors with the writer."""

    nameserver: str = ""
    """``host:port;host:port``, or a URL that returns them; if empty, the driver's
    ``NAMESRV_ADDR`` or ``ROCKETMQ_NAMESRV_DOMAIN``."""

    namespace: str = ""
    topic: str | None = None
    """The topic of all rows, overriding their column ``topic``."""

    group: str = "spark-sink"
    batch_size: int = setting("batchSize", 2000, 1, _MOST)
    """Maximum messages per batch; those of one topic form one unless delayed or compressed."""

    batch_bytes: int = setting("batchBytes", 1024 * 1024, 1, _MOST)
    """Maximum bytes per batch, if ``body_bytes_max`` is not less."""

    max_in_flight: int = setting("maxInFlight", 8, 1, _MOST)
    """Sends of a task without a response yet, each of a message or a batch; further ones wait.

    A broker refuses what has waited for 200 ms, so more would not be faster.
    """

    send_timeout_ms: int = setting("sendTimeoutMs", 3000, 1, _MOST)
    """For each attempt."""

    retries: int = setting("retries", 10, 0, _MOST)
    """Retries of a send after a transient error, with growing pauses between them."""

    retry_unless_ok: bool = False
    """Whether to also retry when it was stored, but not flushed or copied in time."""

    compression: str = "zlib"
    compress_from_bytes: int = setting("compressFromBytes", 4096, 1, _MOST)
    """Bodies of at least this size are compressed, and not put into batches."""

    body_bytes_max: int = setting("bodyBytesMax", 4 * 1024 * 1024, 1, _MOST)
    stamp: str = "true"
    """Whether messages name the row they come from: as property and key, property, or not."""

    write_id: str | None = None
    """The name of a batch write in stamps, for callers that repeat it themselves."""

    reserved_properties: str = "fail"
    """Whether properties with a protocol name fail the write or are left out."""

    idempotent: bool = False
    """Whether rows stored by an earlier attempt of the same write are skipped."""

    def __post_init__(self) -> None:
        texts = described(self)
        for key, allowed in _CHOICES.items():
            if texts[key] not in allowed:
                guess = with_hint(texts[key], allowed, {})
                raise InvalidArgument(f"{key} must be one of {', '.join(allowed)}, got {guess}")
        check_settings(self)
        self.client()
        check_group(self.group)
        if self.topic is not None:
            check_topic_for_sending(with_namespace(self.namespace, self.topic))
        text = self.write_id
        if text == "" or any(mark.isspace() or not mark.isprintable() for mark in text or ""):
            raise InvalidArgument(f"writeId must be text without whitespace, got {text!r}")
        if self.idempotent:
            self._check_idempotent()

    def _check_idempotent(self) -> None:
        if self.topic is None:
            raise InvalidArgument(
                "idempotent needs the option topic: it is where rows of earlier attempts are "
                "looked up"
            )
        if self.stamp == "false":
            raise InvalidArgument(
                "idempotent needs stamps to recognize rows: stamp must be true or property"
            )
        if self.retry_unless_ok:
            raise InvalidArgument(
                "idempotent and retryUnlessOk are mutually exclusive: the one never resends what "
                "may be stored, the other does"
            )

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> SinkOptions:
        """Parse options as Spark passes them, in any case; raises InvalidArgument.

        Direct callers may pass numbers and booleans as such, as to ``DataFrameWriter``.
        """
        by_lower = {key.lower(): key for key in OPTIONS}
        given = {
            by_lower.get(key.lower(), key): value
            for key, value in options.items()
            if key.lower() not in _OF_SPARK
        }
        # The executors may run in another environment than the driver.
        given.setdefault("nameserver", nameserver_from_environment())
        plain, problems = _plain_texts({key: given[key] for key in given if key in OPTIONS})
        if unknown := sorted(given.keys() - set(OPTIONS)):
            named = ", ".join(with_hint(key, OPTIONS, SINK_HINTS) for key in unknown)
            problems.append(f"no option {named}; options are {', '.join(OPTIONS)}")
        try:
            found = configured(cls, plain)
        except InvalidArgument as error:
            raise _refusal([*problems, str(error)]) from error
        if problems:
            raise _refusal(problems)
        return found

    def client(self) -> ClientConfig:
        return ClientConfig(self.nameserver, self.namespace)

    def rules(self) -> MessageRules:
        method = _COMPRESSIONS.get(self.compression)
        return MessageRules(
            body_bytes_max=self.body_bytes_max,
            # Without a method, a size that no body has.
            compress_from_bytes=_MOST if method is None else self.compress_from_bytes,
            compression=method or Compression.ZLIB,
        )

    def producer(self) -> ProducerConfig:
        """Return the producer configuration; failures are retried here, not by the producer."""
        return ProducerConfig(
            send_timeout=self.send_timeout_ms / 1000,
            retries_max=0,
            wait_for_brokers=False,
            messages=self.rules(),
        )


OPTIONS: tuple[str, ...] = tuple(keys_of(SinkOptions))
"""The documented names of all options."""


def _refusal(problems: Sequence[str]) -> InvalidArgument:
    return InvalidArgument(f"invalid options of the rocketmq sink: {'; '.join(problems)}")


def _plain_texts(given: Mapping[str, object]) -> tuple[dict[str, str], list[str]]:
    """Return options with plain numbers in place of sizes and times, and their errors.

    Invalid ones are left out, so that all others can be checked as well.
    """
    plain, problems = {}, []
    for key, value in given.items():
        try:
            plain[key] = _plain_text(key, value)
        except InvalidArgument as error:
            problems.append(str(error))
    return plain, problems


def _plain_text(key: str, value: object) -> str:
    if value is None:
        raise InvalidArgument(f"{key} must not be None; omit it for the default")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    read = _WITH_UNITS.get(key)
    return text if read is None else str(read(key, text.strip()))
