"""What can be set about a sink, and what is said of settings that make no sense."""

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


def test_all_that_is_wrong_is_told_at_once() -> None:
    wrong = {"batchBytes": "much", "sendTimeoutMs": "soon", "retries": "many", "acks": "all"}
    with pytest.raises(InvalidArgument) as raised:
        SinkOptions.parse({**NAMESERVER, **wrong})
    assert all(name in str(raised.value) for name in wrong)


def test_nothing_is_compressed_without_a_method() -> None:
    rules = SinkOptions.parse({**NAMESERVER, "compression": "none"}).rules()
    assert rules.compress_from_bytes > rules.body_bytes_max


def test_what_spark_reads_is_no_option_of_ours() -> None:
    options = {**NAMESERVER, "checkpointlocation": "/x", "path": "y"}
    assert SinkOptions.parse(options) == SinkOptions.parse(NAMESERVER)


def test_the_drivers_environment_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", "10.0.0.9:9876")
    parsed = SinkOptions.parse({})
    monkeypatch.delenv("NAMESRV_ADDR")
    assert parsed.client().nameserver_addresses == ("10.0.0.9:9876",)
    with pytest.raises(InvalidArgument, match="nameserver is ''"):
        SinkOptions.parse({})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("batchSize", "0", "batchSize is 0: a whole number of at least 1"),
        ("batchsize", "many", "batchSize is 'many': a whole number"),
        ("batchBytes", "0", "batchBytes is '0': a size such as 500k, 64m, 1g is allowed"),
        ("batchbytes", "much", "batchBytes is 'much': a size"),
        ("batchBytes", "1.5m", "batchBytes is '1.5m': a size"),
        ("batchBytes", "-1", "batchBytes is '-1': a size"),
        ("batchBytes", "", "batchBytes is '': a size"),
        ("batchBytes", "9" * 5000, "a size"),
        ("maxInFlight", "0", "maxInFlight is 0"),
        ("sendTimeoutMs", "0s", "sendTimeoutMs is '0s': a time such as 500ms, 5s, 1m is allowed"),
        ("sendTimeoutMs", "soon", "sendTimeoutMs is 'soon': a time"),
        ("sendTimeoutMs", "5k", "sendTimeoutMs is '5k': a time"),
        ("sendTimeoutMs", "40000d", "sendTimeoutMs is '40000d': a time such as"),
        ("batchBytes", "9999999999g", "batchBytes is 10737418238926258176: at most 2147483647"),
        ("batchBytes", "2g", "batchBytes is 2147483648: at most 2147483647 is allowed"),
        ("compressFromBytes", "2g", "compressFromBytes is 2147483648: at most 2147483647"),
        ("bodyBytesMax", "2g", "bodyBytesMax is 2147483648: at most 2147483647 is allowed"),
        ("batchSize", "2147483648", "batchSize is 2147483648: at most 2147483647 is allowed"),
        ("maxInFlight", "2147483648", "maxInFlight is 2147483648: at most 2147483647"),
        ("retries", "2147483648", "retries is 2147483648: at most 2147483647 is allowed"),
        ("retries", "-1", "retries is -1"),
        ("retryUnlessOk", "maybe", "retryUnlessOk is 'maybe': true or false"),
        ("compression", "rar", "compression is 'rar': lz4, zstd, zlib, none"),
        ("compressFromBytes", "0", "compressFromBytes is '0': a size"),
        ("bodyBytesMax", "0", "bodyBytesMax is '0': a size"),
        ("stamp", "yes", "stamp is 'yes': true, property, false"),
        ("reservedProperties", "keep", "reservedProperties is 'keep': fail, drop"),
        ("writeId", "a b", "writeId is 'a b'"),
        ("group", "a b", "group is 'a b'"),
        ("topic", "a b", "topic is 'a b'"),
        ("topic", "SCHEDULE_TOPIC_XXXX", "only brokers send to it"),
        ("namespace", "a b", "namespace is 'a b'"),
        ("nameserver", "nowhere", "nowhere"),
        ("acks", "all", "acks is not a setting: batchBytes, batchSize"),
    ],
)
def test_what_makes_no_sense_is_named(key: str, value: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match="options of a rocketmq sink") as raised:
        SinkOptions.parse({**NAMESERVER, key: value})
    assert words in str(raised.value)


def test_the_largest_numbers_are_allowed() -> None:
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
def test_none_is_no_value(key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{key} is None: leave it out to have its default"):
        SinkOptions.parse({**NAMESERVER, key: None})


def test_every_option_is_documented() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert [key for key in OPTIONS if f"| `{key}` |" not in text] == []
