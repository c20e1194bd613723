"""Queue selectors, for ordering among messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from turbopump.message import MessageQueue
from turbopump.wire.hashing import INT_MAX, string_hash

Selector = Callable[[Sequence[MessageQueue]], MessageQueue]
"""Chooses one of a topic's queues; any such function works.

::

    producer.send(message, to=lambda queues: queues[-1])
"""

_LONG_BITS = 0xFFFF_FFFF_FFFF_FFFF
_INT_BITS = 0xFFFF_FFFF


def by_hash(key: str | int) -> Selector:
    """Choose by key: the same key gives the same queue, as long as the topic's queues are the same.

    Java producers make the same choice for the same text or number.

    ::

        producer.send(message, to=by_hash("customer-42"))
    """
    value = abs(string_hash(key) if isinstance(key, str) else _int_hash(key))
    return lambda queues: queues[value % len(queues)]


def by_chance(chance: random.Random | None = None) -> Selector:
    """Choose a queue at random, all with equal probability.

    ::

        producer.send(message, to=by_chance())
    """
    return random.choice if chance is None else chance.choice


def _int_hash(number: int) -> int:
    """Return Java's hash of an Integer or, beyond its range, of a Long."""
    if -INT_MAX - 1 <= number <= INT_MAX:
        return number
    bits = number & _LONG_BITS
    folded = (bits ^ bits >> 32) & _INT_BITS
    return folded - (1 << 32) if folded > INT_MAX else folded
