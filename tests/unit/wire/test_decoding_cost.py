"""Decoding what a peer sends takes steps in proportion to its length, whatever it is.

Counted are calls of Python and C functions, which include each comparison of two keys. What one
call of a pattern or of msgspec does is out of sight here; their inputs are in the same list.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from turbopump.errors import BodyError, TurbopumpError
from turbopump.wire import lenient_json
from turbopump.wire.bodies import Heartbeat
from turbopump.wire.command import decode_header

STEPS_PER_BYTE_MAX = 12


def steps(call: Callable[[], object]) -> int:
    """Count the calls that a call makes; errors that are reported to peers are fine."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(note)
    try:
        call()
    except TurbopumpError:
        pass
    finally:
        sys.setprofile(None)
    return count


def same_text_keys(count: int) -> str:
    """Objects as keys that differ only in numbers being numbers or texts."""
    fields = range(count.bit_length() + 1)
    choices = itertools.product(("1", '"1"'), repeat=len(fields))
    keys = ("{" + ",".join(f'"{n}":{v}' for n, v in enumerate(choice)) + "}" for choice in choices)
    return "{" + ",".join(f"{key}:0" for key in itertools.islice(keys, count)) + "}"


def same_hash_integers(count: int) -> str:
    """Integers as keys whose hashes are all the same."""
    return "{" + ",".join(f"{sys.hash_info.modulus * n + 1}:0" for n in range(count)) + "}"


def quoted_object_keys(count: int) -> str:
    return "{" + ",".join(f'"{{\\"a\\":{n}}}":0' for n in range(count)) + "}"


def shared_by_reference(count: int) -> str:
    groups = ['{"groupName":"g","subscriptionDataSet":[' + ",".join(["{}"] * count) + "]}"]
    groups += ['{"$ref":"$.consumerDataSet[0]"}'] * count
    return '{"clientID":"c","consumerDataSet":[' + ",".join(groups) + "]}"


def references_by_many_paths(count: int) -> str:
    entries = ",".join(f'"{n}":{{"$ref":"${n}.a"}}' for n in range(count))
    return '{"a":[' + "0," * count + "0]," + entries + "}"


HARD: list[Callable[[int], str]] = [
    same_text_keys,
    same_hash_integers,
    quoted_object_keys,
    shared_by_reference,
    references_by_many_paths,
    lambda count: "{" + "1:1," * count + "1:1}",
    lambda count: "{" + "{}:1," * count + "{}:1}",
    lambda count: "1:" * count,
    lambda count: "{" * count,
    lambda count: "{1:" * count,
    lambda count: "[" * count + "1:" + "]" * count,
    lambda count: '"' + '\\"' * count,
    lambda count: '{"' * count,
    lambda count: '{1:"' + "\\" * count,
    lambda count: "{1:" + "9" * count + "}",
    lambda count: "{-1" + " " * count + "}",
    lambda count: "{1:2}" + " {} " * count,
    lambda count: "-" * count,
]


def read_all(text: str) -> None:
    for read in (
        lambda: lenient_json.loads(text),
        lambda: Heartbeat.decode(text.encode()),
        lambda: decode_header(text.encode(), 0),
        lambda: decode_header(f'{{"code":34,"extFields":{text}}}'.encode(), 0),
    ):
        try:
            read()
        except TurbopumpError:
            continue


@pytest.mark.parametrize("text_of", HARD)
def test_hard_texts_take_steps_for_each_byte(text_of: Callable[[int], str]) -> None:
    text = text_of(1500)
    assert steps(lambda: read_all(text)) <= 1000 + 4 * STEPS_PER_BYTE_MAX * len(text)


def test_generated_texts_take_steps_for_each_byte() -> None:
    chance = random.Random(14)
    pieces = [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"',
        "\\",
        "1",
        "-7",
        " ",
        '"a":',
        '{"$ref":"$.a"}',
        "{1:",
    ]
    for _ in range(300):
        run = "".join(chance.choices(pieces, k=chance.randint(1, 12)))
        text = run * chance.randint(1, 200)
        count = steps(functools.partial(read_all, text))
        assert count <= 1000 + 4 * STEPS_PER_BYTE_MAX * len(text), run


@pytest.mark.parametrize("text_of", [same_text_keys, same_hash_integers, quoted_object_keys])
def test_keys_have_hashes_that_no_peer_can_choose(text_of: Callable[[int], str]) -> None:
    keys = lenient_json.with_object_keys(lenient_json.loads(text_of(200)))
    assert {type(key) for key in keys} <= {str, lenient_json.ObjectKey}
    assert len(set(map(hash, keys))) == len(keys) == 200


@pytest.mark.parametrize("text_of", [shared_by_reference, references_by_many_paths])
def test_references_do_not_multiply(text_of: Callable[[int], str]) -> None:
    with pytest.raises(BodyError, match="references"):
        lenient_json.loads(text_of(500))
