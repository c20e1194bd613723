from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.errors import BodyError
from turbopump.message import MessageQueue
from turbopump.wire.lenient_json import DEPTH_MAX, ObjectKey, dumps, loads

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts
proper = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4)
)
lenient = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(texts | st.integers(0, 2**40), inner, max_size=4)
    ),
)


@given(proper)
def test_reads_and_writes_proper_json(value: Any) -> None:
    assert loads(json.dumps(value)) == value
    assert json.loads(dumps(value)) == value


@given(lenient)
def test_bare_keys_round_trip(value: Any) -> None:
    assert loads(dumps(value, bare_keys=True)) == loads(dumps(value)) == _with_text_keys(value)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value


def test_keys_of_every_kind() -> None:
    read = loads('{"t":{0:"a",-1:"b"},"q":{{"topic":"T","queueId":1}:{"x":1.5}},"e":{}, "l":[ ]}')
    assert read["t"] == {"0": "a", "-1": "b"}
    assert read["q"] == {ObjectKey({"topic": "T", "queueId": 1}): {"x": 1.5}}
    assert read["q"][ObjectKey({"queueId": 1, "topic": "T"})] == {"x": 1.5}
    assert (read["e"], read["l"]) == ({}, [])


def test_writing_keys_that_are_not_texts() -> None:
    queue = MessageQueue("T", "b", 0)
    table = {queue: {1: 2.0}}
    assert dumps(table, bare_keys=True) == '{{"topic":"T","brokerName":"b","queueId":0}:{1:2.0}}'
    assert (
        dumps(table)
        == '{"{\\"topic\\":\\"T\\",\\"brokerName\\":\\"b\\",\\"queueId\\":0}":{"1":2.0}}'
    )


def test_pretty_printed_files_of_apache_rocketmq() -> None:
    text = '{\n\t"offsetTable":{{\n\t\t\t"queueId":3,\n\t\t\t"topic":"T"\n\t\t}:0,\n\t\t1:2\n\t}\n}'
    assert loads(text) == {"offsetTable": {ObjectKey({"queueId": 3, "topic": "T"}): 0, "1": 2}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":{"x":1},"b":{"$ref":"$.a"}}', {"a": {"x": 1}, "b": {"x": 1}}),
        ('[{"x":1},{"$ref":"$[0]"}]', [{"x": 1}, {"x": 1}]),
        ('{"a":{"b.c":[7]},"d":{"$ref":"$.a.b\\\\.c[0]"}}', {"a": {"b.c": [7]}, "d": 7}),
        ('{"a":{"$ref":"$.nowhere"}}', {"a": None}),
        ('{"a":{"$ref":"$.a"}}', {"a": None}),
        ('{"a":{"b":{"$ref":"$"}}}', {"a": {"b": None}}),
        ('{"a":{"b":{"$ref":".."}}}', {"a": {"b": None}}),
        ('{"a":{"b":{"$ref":"@"}}}', {"a": {"b": None}}),
    ],
)
def test_references(text: str, expected: Any) -> None:
    assert loads(text) == expected


def test_reference_to_the_value_of_a_queue() -> None:
    key = '{"brokerName":"b","queueId":1,"topic":"T"}'
    other = '{"brokerName":"b","queueId":11,"topic":"T"}'
    path = r"$.t.MessageQueue\\ \\[topic\\=T\\,\\ brokerName\\=b\\,\\ queueId\\=11\\]"
    read = loads(f'{{"t":{{{key}:{{"n":1}},{other}:{{"n":2}}}},"r":{{"$ref":"{path}"}}}}')
    assert read["r"] == {"n": 2}


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        ("{", 1),
        ('{"a"', 4),
        ('{"a":}', 5),
        ('{"é":x}', 6),
        ("[1,]", 3),
        ("[1 2]", 3),
        ("{}x", 3),
        ('"a', 2),
        ('{0:"\\x"}', 6),
        ("{null:1}", 1),
        ("{[1]:1}", 1),
        ("nul", 3),
        ("'a'", 0),
        ('{1:2,-30 : {{"é":1} :x}}', 22),
        ('{1:2,"é":{{"a":1}:2}', 21),
    ],
)
def test_errors_name_the_byte(text: str, position: int) -> None:
    with pytest.raises(BodyError, match="not JSON") as failure:
        loads(text)
    assert failure.value.position == position


def test_nesting_is_bounded() -> None:
    deep = "[" * 100_000
    with pytest.raises(BodyError, match=f"nested deeper than {DEPTH_MAX}"):
        loads(deep)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1e999}',
        "{1:1e999}",
        "9" * 6000,
        "{1:" + "9" * 6000 + "}",
        "[" * 500 + "]" * 500,
        "[" * 500 + '{"$ref":"$"}' + "]" * 500,
        "[" * 500 + "{{}:1}" + "]" * 500,
        "[1\u0661]",
        "{true:1}",
        '"\ud800"',
        '{"a":"\ud800"}',
    ],
)
def test_whatever_is_wrong_is_a_body_error(text: str) -> None:
    with pytest.raises(BodyError):
        loads(text)


def test_odd_keys_and_paths_that_are_valid() -> None:
    assert list(loads('{{1:2,"a":3}:4}').values()) == [4]
    assert loads('{"r":{"$ref":"$.a[' + "9" * 5000 + ']"}}') == {"r": None}
    assert loads('{"a":{"$ref":"$.b"},"b":{"$ref":"$.a"}}') == {"a": None, "b": None}
    assert loads('{"$ref":"$.x"}', references=False) == {"$ref": "$.x"}


def test_many_references_take_time_for_each_and_not_for_each_pair() -> None:
    count = 100_000
    entries = ",".join(f'"k{n}":{{"$ref":"$.a.z"}}' for n in range(count))
    read = loads(f'{{"a":{{{entries}}}}}')
    assert len(read["a"]) == count
    assert set(read["a"].values()) == {None}


def test_object_keys_render() -> None:
    assert repr(ObjectKey({"a": 1})) == "ObjectKey({'a': 1})"
    assert len(ObjectKey({"a": 1})) == 1
