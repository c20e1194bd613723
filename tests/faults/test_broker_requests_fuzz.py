"""A broker answers every request, however malformed, and never fails internally."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import fields

from broker_parts import FakePeer, Parts, finished
from header_catalogue import REQUEST_HEADERS
from turbopump.errors import TurbopumpError
from turbopump.net.connection import Connection
from turbopump.wire.bodies import TopicConfig
from turbopump.wire.catalogue import REQUEST_BODIES
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command

pytestmark = pytest.mark.slow

CODES = sorted({
    *(14, 15, 17, 21, 25, 26, 28, 34, 35, 38, 41, 42, 43, 45, 46, 50, 51, 52, 53, 200, 201, 202),
    *(203, 204, 207, 208, 215, 222, 223, 300, 301, 303, 305, 306, 307, 308, 309, 314, 315, 316),
    *(317, 321, 328, 329),
})  # fmt: skip

names = st.sampled_from(["T", "g", "c1", "TBW102", "%RETRY%g", "..", "/", "", "T@g", "\x00", "ü"])
words = st.sampled_from(["true", "false", "SINGLE_TAG", "TOPIC_PUT_NUMS"])
digits = st.sampled_from(["0", "-1", "1", "5", "9" * 30, str(2**31), str(2**63)])
texts = names | words | digits | st.text(max_size=20)
numbers = st.integers(-(2**64), 2**64)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def names_of(kind: Any) -> list[str]:
    return [] if not isinstance(kind, type) else [field.encode_name for field in fields(kind)]


@st.composite
def requests(draw: st.DrawFn) -> Command:
    code = draw(st.sampled_from(CODES))
    header = st.fixed_dictionaries(
        {}, optional=dict.fromkeys(names_of(REQUEST_HEADERS.get(code)), texts)
    )
    body = st.fixed_dictionaries(
        {}, optional=dict.fromkeys(names_of(REQUEST_BODIES.get(code)), values)
    )
    return Command(
        code=code,
        ext_fields=draw(header),
        body=draw(body.map(_json) | st.binary(max_size=30)),
        language=draw(st.sampled_from([None, 0, 1])),
        version=draw(st.sampled_from([0, 27, 61, 409, -1])),
    )


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


async def _awaited(outcome: Awaitable[Command | None]) -> Command | None:
    return await outcome


def world() -> Parts:
    parts = Parts(Path())
    finished(
        parts.topics.update(TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2))
    )
    parts.store.put("T", 0, 1000, 2000)
    parts.store.units["T", 0] = [(0, 10, 1), (10, 10, 1)]
    parts.offsets.commit_all("g", "T", {0: 1, 1: 0})
    parts.join("g")
    return parts


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(requests(), min_size=1, max_size=8))
def test_only_responses_and_our_own_errors(asked: list[Command]) -> None:
    parts, peer = world(), FakePeer()
    for command in asked:
        try:
            outcome = parts.router.outcome(command, cast(Connection, peer))
            if outcome is not None and not isinstance(outcome, Command):
                outcome = asyncio.run(_awaited(outcome))
        except TurbopumpError:
            continue
        assert isinstance(outcome, Command)
        assert outcome.is_response
    assert all(RequestCode(command.code) for command in peer.sent)


def test_every_code_is_served() -> None:
    assert set(CODES) <= set(world().router._handlers)
