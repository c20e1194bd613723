"""The options of a sink, and the errors for invalid ones."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from turbopump.errors import InvalidArgument
from turbopump.spark.writing.options import OPTIONS, SinkOptions
from turbopump.wire.sysflag import Compression

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "spark-sink.md"
NAMESERVER = {"nameserver": "127.0.0.1:9876"}


def test_every_option_is_read_in_any_case() -> None:
    given = {
        "nameserver": "10.0.0.1:9876;10.0.0.2:9876",
        "namespace": "staging",
        "topic": "orders",
        "group": "writers",
        "batchSize": "10",
        "batchBytes": "1000",
        "maxInFlight": "3",
        "sendTimeoutMs": "500",
        "retries": "0",
        "retryUnlessOk": "true",
        "idempotent": "false",
        "compression": "zstd",
        "compressFromBytes": "100",
        "bodyBytesMax": "2000",
        "stamp": "property",
        "writeId": "monday",
        "reservedProperties": "drop",
    }
    assert set(given) == set(OPTIONS)
    parsed = SinkOptions.parse({key.lower(): value for key, value in given.items()})
    assert parsed == SinkOptions(
        nameserver="10.0.0.1:9876;10.0.0.2:9876",
        namespace="staging",
        topic="orders",
        group="writers",
        batch_size=10,
        batch_bytes=1000,
        max_in_flight=3,
        send_timeout_ms=500,
        retries=0,
        retry_unless_ok=True,
        compression="zstd",
        compress_from_bytes=100,
        body_bytes_max=2000,
        stamp="property",
        write_id="monday",
        reserved_properties="drop",
    )
    assert pickle.loads(pickle.dumps(parsed)) == parsed
    assert parsed.client().namespace == "staging"
    assert parsed.producer().send_timeout_ms == 500
    assert parsed.rules().compression is Compression.ZSTD
    assert parsed.rules().compress_from_bytes == 100


@pytest.mark.parametrize(
    ("key", "texts"),
    [
        ("batchBytes", {"1048576": 1048576, "500k": 512_000, "1m": 1 << 20, " 2 MB ": 2 << 20}),
        ("compressFromBytes", {"4096": 4096, "4k": 4096, "1g": 1 << 30}),
        ("bodyBytesMax", {"4194304": 4194304, "4m": 4194304, "100b": 100}),
        ("sendTimeoutMs", {"3000": 3000, "500ms": 500, "5s": 5000, "1m": 60_000, " 7 ": 7}),
    ],
)
def test_sizes_and_times_may_have_units(key: str, texts: dict[str, int]) -> None:
    name = re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), key)
    parsed = [SinkOptions.parse({**NAMESERVER, key: text}) for text in texts]
    assert [getattr(each, name) for each in parsed] == list(texts.values())


def test_all_errors_are_reported_in_one_message() -> None:
    wrong = {"batchBytes": "much", "sendTimeoutMs": "soon", "retries": "many", "acks": "all"}
    with pytest.raises(InvalidArgument) as raised:
        SinkOptions.parse({**NAMESERVER, **wrong})
    assert all(name in str(raised.value) for name in wrong)


def test_nothing_is_compressed_without_a_method() -> None:
    rules = SinkOptions.parse({**NAMESERVER, "compression": "none"}).rules()
    assert rules.compress_from_bytes > rules.body_bytes_max


def test_options_that_spark_reads_are_ignored() -> None:
    options = {**NAMESERVER, "checkpointlocation": "/x", "path": "y"}
    assert SinkOptions.parse(options) == SinkOptions.parse(NAMESERVER)


def test_the_drivers_environment_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", "10.0.0.9:9876")
    parsed = SinkOptions.parse({})
    monkeypatch.delenv("NAMESRV_ADDR")
    assert parsed.client().nameserver_addresses == ("10.0.0.9:9876",)
    with pytest.raises(InvalidArgument, match="nameserver must be host:port;host:port, got ''"):
        SinkOptions.parse({})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("batchSize", "0", "batchSize must be a whole number, 1 to 2147483647, got 0"),
        ("batchsize", "many", "batchSize must be a whole number, got 'many'"),
        ("batchBytes", "0", "batchBytes must be a size such as 500k, 64m or 1g, got '0'"),
        ("batchbytes", "much", "batchBytes must be a size"),
        ("batchBytes", "1.5m", "batchBytes must be a size"),
        ("batchBytes", "-1", "batchBytes must be a size"),
        ("batchBytes", "", "batchBytes must be a size"),
        ("batchBytes", "9" * 5000, "a size"),
        ("maxInFlight", "0", "maxInFlight must be a whole number, 1 to 2147483647, got 0"),
        ("sendTimeoutMs", "0s", "sendTimeoutMs must be a duration such as 500ms, 5s or 1m"),
        ("sendTimeoutMs", "soon", "sendTimeoutMs must be a duration"),
        ("sendTimeoutMs", "5k", "sendTimeoutMs must be a duration"),
        ("sendTimeoutMs", "40000d", "sendTimeoutMs must be a duration"),
        (
            "batchBytes",
            "9999999999g",
            "batchBytes must be a whole number, 1 to 2147483647, got 10737418238926258176",
        ),
        ("batchBytes", "2g", "batchBytes must be a whole number, 1 to 2147483647, got 2147483648"),
        (
            "compressFromBytes",
            "2g",
            "compressFromBytes must be a whole number, 1 to 2147483647, got 2147483648",
        ),
        (
            "bodyBytesMax",
            "2g",
            "bodyBytesMax must be a whole number, 1 to 2147483647, got 2147483648",
        ),
        (
            "batchSize",
            "2147483648",
            "batchSize must be a whole number, 1 to 2147483647, got 2147483648",
        ),
        (
            "maxInFlight",
            "2147483648",
            "maxInFlight must be a whole number, 1 to 2147483647, got 2147483648",
        ),
        (
            "retries",
            "2147483648",
            "retries must be a whole number, 0 to 2147483647, got 2147483648",
        ),
        ("retries", "-1", "retries must be a whole number, 0 to 2147483647, got -1"),
        ("retryUnlessOk", "maybe", "retryUnlessOk must be true or false, got 'maybe'"),
        ("compression", "rar", "compression must be one of lz4, zstd, zlib, none, got 'rar'"),
        ("compressFromBytes", "0", "compressFromBytes must be a size"),
        ("bodyBytesMax", "0", "bodyBytesMax must be a size"),
        ("stamp", "yes", "stamp must be one of true, property, false, got 'yes'"),
        ("reservedProperties", "keep", "reservedProperties must be one of fail, drop, got 'keep'"),
        ("writeId", "a b", "writeId must be text without whitespace, got 'a b'"),
        ("writeId", "", "writeId must be text without whitespace, got ''"),
        ("idempotent", "maybe", "idempotent must be true or false, got 'maybe'"),
        ("idempotent", "true", "idempotent needs the option topic"),
        ("group", "a b", ", got 'a b'"),
        ("topic", "a b", ", got 'a b'"),
        ("topic", "SCHEDULE_TOPIC_XXXX", "only brokers send to it"),
        ("namespace", "a b", ", got 'a b'"),
        ("nameserver", "nowhere", "nowhere"),
        ("acks", "all", "no option 'acks'; options are nameserver, namespace, topic"),
        ("batchsizes", "1", "'batchsizes' (did you mean batchSize?)"),
        ("stamp", "propety", "got 'propety' (did you mean property?)"),
        ("subscribe", "a", "'subscribe' (use topic, or the column topic)"),
        ("tags", "a", "'tags' (use the column tags)"),
        ("kafka.ssl.key.password", "a", "(TLS and credentials are not supported)"),
        ("kafka.acks", "all", "'kafka.acks' (use the broker's flushDiskType"),
        ("kafka.client.id", "x", "(options are not passed on to Kafka's clients)"),
    ],
)
def test_invalid_options_are_named(key: str, value: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match="invalid options of the rocketmq sink") as raised:
        SinkOptions.parse({**NAMESERVER, key: value})
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"stamp": "false"}, "stamp must be true or property"),
        ({"retryUnlessOk": "true"}, "idempotent and retryUnlessOk are mutually exclusive"),
    ],
)
def test_unsupported_idempotent_writes_are_rejected(more: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        SinkOptions.parse({**NAMESERVER, "topic": "orders", "idempotent": "true", **more})


def test_the_largest_numbers_are_accepted() -> None:
    largest = {"sendTimeoutMs": "2147483647", "batchBytes": "2147483647"}
    found = SinkOptions.parse({**NAMESERVER, **largest})
    assert (found.send_timeout_ms, found.batch_bytes) == (2**31 - 1, 2**31 - 1)


def test_numbers_and_truths_need_not_be_texts() -> None:
    given: dict[str, object] = {
        "batchBytes": 65536,
        "sendTimeoutMs": 500,
        "retries": 2,
        "retryUnlessOk": True,
        "stamp": False,
    }
    found = SinkOptions.parse({**NAMESERVER, **given})
    assert (found.batch_bytes, found.send_timeout_ms, found.retries) == (65536, 500, 2)
    assert (found.retry_unless_ok, found.stamp) == (True, "false")


@pytest.mark.parametrize("key", ["batchBytes", "topic", "retries", "nameserver"])
def test_none_is_rejected(key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{key} must not be None; omit it for the default"):
        SinkOptions.parse({**NAMESERVER, key: None})


def test_every_option_is_documented() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert [key for key in OPTIONS if f"| `{key}` |" not in text] == []
