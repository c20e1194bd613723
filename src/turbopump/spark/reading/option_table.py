"""The options of the source, as users write them and as the documentation lists them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """One option as users write it; ``default`` is what the documentation says of it."""

    name: str
    default: str
    meaning: str


OPTIONS = (
    Option("nameserver", "`NAMESRV_ADDR`", "name servers, `host:port;host:port`"),
    Option("namespace", "none", "prefixes the names of topics and groups"),
    Option("topic", "", "the topic to read"),
    Option("topics", "", "topics to read, `a,b,c`"),
    Option("topicPattern", "", "a regular expression that must match the whole topic name"),
    Option("assign", "", "the queues to read, JSON `{topic: {broker: [0, 1]}}`"),
    Option("group", "none", "the consumer group of the query"),
    Option("allowSharedGroup", "`false`", "whether push consumers may use the same group"),
    Option("startingOffsets", "see below", "where a read starts"),
    Option("endingOffsets", "`latest`", "where a batch read ends; batch only"),
    Option(
        "tags",
        "all",
        "the tags to read, `a || b`, or JSON by topic, `{topic: a || b}`; the broker filters",
    ),
    Option(
        "sql",
        "none",
        "an SQL92 expression over properties, evaluated by the broker, or JSON by topic",
    ),
    Option("maxOffsetsPerTrigger", "no limit", "maximum messages per micro-batch"),
    Option("maxBytesPerTrigger", "no limit", "approximate maximum bytes per micro-batch"),
    Option("minOffsetsPerTrigger", "0", "minimum messages per micro-batch; fewer wait for more"),
    Option("maxTriggerDelay", "`15m`", "maximum wait for `minOffsetsPerTrigger`"),
    Option("minPartitions", "none", "minimum tasks per batch; large ranges are split"),
    Option("maxRecordsPerPartition", "none", "maximum messages per task"),
    Option("partitionPerQueue", "`false`", "whether each queue gets its own task, in order"),
    Option("failOnDataLoss", "`true`", "whether lost messages fail the query"),
    Option(
        "onBadRecord",
        "`fail`",
        "what to do about a record that cannot be decoded: `fail`, `null`, `skip` or `deadLetter`; "
        "see below",
    ),
    Option(
        "deadLetterTopic",
        "the group's, `%DLQ%group`",
        "where `onBadRecord=deadLetter` sends records; needed without `group`",
    ),
    Option(
        "commitOffsets",
        "`true` with a `group` of its own",
        "whether the group's offsets are committed",
    ),
    Option("pullBatchSize", "1000", "maximum messages per pull; the broker may return fewer"),
    Option(
        "pullsInFlight",
        "128",
        "maximum pending pulls per task; fewer once they cover 4,096 messages",
    ),
    Option("includeProperties", "`true`", "`false` omits the column `properties`"),
    Option("columns", "all", "the columns to read, `a,b,c`"),
    Option(
        "readFrom",
        "`master`",
        "the replica that tasks read: `master`, or `slave` to spare the master; see below",
    ),
    Option("requestTimeout", "`10s`", "timeout of one request"),
    Option("retries", "8", "retries of a failed request"),
    Option("discoveryInterval", "`30s`", "how often to look up new queues, brokers and topics"),
    Option(
        "idleWait", "`500ms`", "how long an idle stream waits for messages before it plans again"
    ),
)

BATCH_ONLY = ("endingOffsets",)
STREAM_ONLY = (
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "commitOffsets",
    "idleWait",
)
