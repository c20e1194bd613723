"""Replacements for options of Kafka's connector, and for removed ones."""

from __future__ import annotations

from collections.abc import Mapping

_TIMESTAMP = "a timestamp in {0}, as {0}=2026-01-31T08:00:00Z"

_TIMESTAMPS = 'timestamps in {0}, as {0}={{"orders": {{"0": "2026-01-31T08:00:00Z"}}}}'

_CONNECTION = dict.fromkeys(
    ("kafka.bootstrap.servers", "bootstrap.servers", "bootstrapServers"),
    "nameserver, the addresses of the name servers",
)

_SECURITY = ("kafka.security.", "kafka.sasl.", "kafka.ssl.")

_ASYNC_PROGRESS = (
    "asyncProgressTrackingEnabled",
    "asyncProgressTrackingCheckpointIntervalMs",
    "asyncProgressTrackingOverrideSinkSupportCheck",
)

SOURCE_HINTS: Mapping[str, str] = {
    **_CONNECTION,
    **dict.fromkeys(_ASYNC_PROGRESS, "it with writeStream; Spark allows it for few sinks"),
    "subscribe": "topic, or topics for several",
    "subscribePattern": "topicPattern",
    "startingTimestamp": _TIMESTAMP.format("startingOffsets"),
    "endingTimestamp": _TIMESTAMP.format("endingOffsets"),
    "startingOffsetsByTimestamp": _TIMESTAMPS.format("startingOffsets"),
    "endingOffsetsByTimestamp": _TIMESTAMPS.format("endingOffsets"),
    "kafka.group.id": "group",
    "groupIdPrefix": "group",
    "includeHeaders": "includeProperties",
    "fetchOffset.numRetries": "retries",
    "fetchOffset.retryIntervalMs": "retries; the backoff grows from 0.1 to 5 s",
    "kafkaConsumer.pollTimeoutMs": "requestTimeout",
    "kafka.request.timeout.ms": "requestTimeout",
    "kafka.max.poll.records": "pullBatchSize",
    "kafka.max.partition.fetch.bytes": "pullBatchSize",
    "kafka.auto.offset.reset": "startingOffsets",
    "kafka.isolation.level": "not needed: uncommitted messages are never read",
    "kafka.enable.auto.commit": "commitOffsets",
    "path": "topic, or topics for several; load() takes no path",
    "checkpointLocation": "it with writeStream: readStream has no checkpoint",
    "keys": "where() on the column keys; brokers filter by tags and sql",
    "pushFilters": (
        "startingOffsets, endingOffsets, tags, sql or assign; Spark applies pushed filters to "
        "other queries of the same DataFrame, too"
    ),
}

SINK_HINTS: Mapping[str, str] = {
    **_CONNECTION,
    **dict.fromkeys(_ASYNC_PROGRESS, "not supported: Spark refuses it for sinks in Python"),
    "kafka.batch.size": "batchBytes",
    "kafka.linger.ms": "not needed: rows are sent immediately",
    "kafka.compression.type": "compression",
    "kafka.max.request.size": "bodyBytesMax",
    "kafka.retries": "retries",
    "kafka.delivery.timeout.ms": "retries and sendTimeoutMs",
    "kafka.request.timeout.ms": "sendTimeoutMs",
    "kafka.max.in.flight.requests.per.connection": "maxInFlight",
    "kafka.acks": "the broker's flushDiskType and brokerRole, and retryUnlessOk",
    "kafka.enable.idempotence": "idempotent",
    "kafka.partitioner.class": "the columns queueId or shardingKey",
    "includeHeaders": "the column properties",
    "subscribe": "topic, or the column topic",
    "topics": "topic, or the column topic for several",
    "tags": "the column tags",
    "keys": "the column keys",
    "columns": "select() before writing",
}

SOURCE_COLUMN_HINTS: Mapping[str, str] = {
    "value": "body",
    "key": "keys, a string",
    "partition": "queueId and broker",
    "offset": "queueOffset",
    "timestamp": "bornTimestamp or storeTimestamp",
    "timestampType": "not needed: bornTimestamp and storeTimestamp are two columns",
    "headers": "properties, a map of strings",
}

SINK_COLUMN_HINTS: Mapping[str, str] = {
    "value": "body",
    "key": "shardingKey to choose the queue, keys to search by",
    "partition": "queueId",
    "headers": "properties, a map of strings",
}


def hint(key: str, hints: Mapping[str, str]) -> str | None:
    """Return what to do instead of setting an option, or None if nothing is known."""
    found = {name.lower(): text for name, text in hints.items()}.get(key.lower())
    if found is None:
        if key.lower().startswith(_SECURITY):
            return "TLS and credentials are not supported"
        is_kafka = key.lower().startswith("kafka.")
        return "options are not passed on to Kafka's clients" if is_kafka else None
    return found if found.startswith(("not needed", "not supported")) else f"use {found}"
