"""Java hashes of the keys of many messages, as the key index needs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turbopump.wire import properties
from turbopump.wire.aligned_properties import POWERS_OF_31, AlignedProperties, Hashes, Ints
from turbopump.wire.hashing import INT_MAX, string_hash
from turbopump.wire.property_texts import PropertyTexts

_MASK = 0xFFFF_FFFF


def key_hashes(topics: Sequence[bytes], texts: PropertyTexts) -> tuple[Ints, Ints]:
    """Find the keys in messages' properties; return each key's message and hash.

    They are in the order of the messages: the unique key first, then the sender's. ``topics`` has
    that of each message, or one that all of them share.
    """
    if len(topics) == 1 and texts.columns is not None:
        return _by_column(topics[0], texts.columns)
    owners, starts, ends = _ranges(texts)
    hashes = texts.hashes(starts, ends) + _prefixes(topics, owners) * POWERS_OF_31[ends - starts]
    for number in texts.foreign(starts, ends):
        key = texts.value(starts[number], ends[number])
        topic = topics[owners[number] if len(topics) > 1 else 0].decode()
        hashes[number] = string_hash(f"{topic}#{key}") & _MASK
    return owners, _magnitudes(hashes)


def _by_column(topic: bytes, columns: AlignedProperties) -> tuple[Ints, Ints]:
    """Do the same for messages whose keys are in the same columns."""
    unique, given = columns.place(properties.UNIQUE_KEY), columns.place(properties.KEYS)
    places = [unique] if unique else []
    places += columns.words(*given) if given else []
    hashes = np.empty((len(columns), len(places)), np.uint32)
    for number, (start, end) in enumerate(places):
        hashes[:, number] = columns.hashes(start, end, f"{topic.decode()}#")
    return np.repeat(np.arange(len(columns)), len(places)), _magnitudes(hashes.ravel())


def _magnitudes(hashes: Hashes) -> Ints:
    magnitudes = np.abs(hashes.view(np.int32).astype(np.int64))
    magnitudes[magnitudes > INT_MAX] = 0
    return magnitudes


def _ranges(texts: PropertyTexts) -> tuple[Ints, Ints, Ints]:
    """Return the message, start and end of each key, in index order."""
    unique = texts.values(properties.UNIQUE_KEY)
    given = texts.split(*texts.values(properties.KEYS))
    owners, starts, ends = (np.concatenate(both) for both in zip(unique, given, strict=True))
    # Stable: the unique keys come first, so each message's unique key does, too.
    order = np.argsort(owners, kind="stable")
    return owners[order], starts[order], ends[order]


def _prefixes(topics: Sequence[bytes], owners: Ints) -> Hashes:
    """Return the hash of each key's prefix."""
    found = {topic: string_hash(f"{topic.decode()}#") & _MASK for topic in set(topics)}
    prefixes = np.array([found[topic] for topic in topics], np.uint32)
    return prefixes[owners] if len(topics) > 1 else prefixes
