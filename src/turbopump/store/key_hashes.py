"""Java's hash of ``topic#key`` for many keys at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turbopump.wire.hashing import INT_MAX, string_hash

_MASK = 0xFFFF_FFFF
_powers: dict[int, NDArray[np.uint32]] = {}


def index_hashes(topics: Sequence[str], keys: Sequence[bytes]) -> NDArray[np.int64]:
    """Return what `turbopump.wire.hashing.index_hash` returns, for each topic and key.

    Keys of one length are hashed together: a loop per character would cost more than all the rest
    of storing a message.
    """
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    hashes = np.empty(len(keys), np.uint32)
    prefixes = {topic: string_hash(topic + "#") & _MASK for topic in set(topics)}
    for number, key in enumerate(keys):
        if key.isascii():
            by_length[len(key)].append(number)
        else:
            text = key.decode("utf-8", "replace")
            hashes[number] = string_hash(f"{topics[number]}#{text}") & _MASK
    for length, numbers in by_length.items():
        joined = b"".join([keys[number] for number in numbers])
        codes = np.frombuffer(joined, np.uint8).reshape(len(numbers), length).astype(np.uint32)
        shift = np.uint32(pow(31, length, 1 << 32))
        starts = np.array([prefixes[topics[number]] for number in numbers], np.uint32)
        hashes[numbers] = codes @ _powers_of(length) + starts * shift
    magnitudes = np.abs(hashes.view(np.int32).astype(np.int64))
    magnitudes[magnitudes > INT_MAX] = 0
    return magnitudes


def _powers_of(length: int) -> NDArray[np.uint32]:
    powers = _powers.get(length)
    if powers is None:
        values = [pow(31, length - 1 - at, 1 << 32) for at in range(length)]
        powers = np.array(values, np.uint32)
        if length <= 128:
            _powers[length] = powers
    return powers
