"""The messages of a run: their identity, their content, and what consumers do with them.

Everything is derived from a message's id, so that any process can check any message.
"""

from __future__ import annotations

import random
from enum import Enum

WORK, ORDERED, DELAYED = "work", "ordered", "delayed"
FLOWS = (WORK, ORDERED, DELAYED)
"""Each is a topic with a consumer group of the same name."""

ATTEMPTS_MAX = 2
DELAYS_MS = {1: 1000, 2: 3000}
"""By delay level, as in `DELAY_LEVELS`; the higher levels are for retries."""
DELAY_LEVELS = "1s 3s 1s 1s 1s 1s"

_FAILING_EVERY = 25
_SIZES = (0, 10, 300, 5000)


class Fate(Enum):
    """What consumers of the concurrent group do with a message."""

    SUCCEEDS = "succeeds"
    FAILS_ONCE = "fails once"
    FAILS_ALWAYS = "fails always"


def message_id(flow: str, sender: str, number: int) -> str:
    return f"{flow}/{sender}/{number}"


def flow_of(identity: str) -> str:
    return identity.partition("/")[0]


def number_of(identity: str) -> int:
    return int(identity.rpartition("/")[2])


def fate_of(identity: str) -> Fate:
    if flow_of(identity) != WORK:
        return Fate.SUCCEEDS
    match number_of(identity) % _FAILING_EVERY:
        case 0:
            return Fate.FAILS_ALWAYS
        case 1:
            return Fate.FAILS_ONCE
        case _:
            return Fate.SUCCEEDS


def delay_level_of(identity: str) -> int:
    if flow_of(identity) != DELAYED:
        return 0
    return 1 + number_of(identity) % len(DELAYS_MS)


def body_of(identity: str) -> bytes:
    chosen = random.Random(identity)
    return identity.encode() + b"|" + chosen.randbytes(chosen.choice(_SIZES))


def identity_of(body: bytes) -> str:
    """Return the id that a body starts with; `is_intact` checks the rest."""
    return body.partition(b"|")[0].decode(errors="replace")


def is_intact(body: bytes) -> bool:
    return body == body_of(identity_of(body))
