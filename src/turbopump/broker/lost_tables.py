"""Tables that are missing although the store has messages: what can be recovered, and what is lost.

A broker writes all its tables soon after its first start, so a missing one was removed, or lies on
a disk that is not mounted. None of them is worth refusing to serve the messages that are there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from turbopump.broker.topics import Topics
from turbopump.tables import Table
from turbopump.wire.names import (
    DEAD_LETTER_PREFIX,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    TRANSACTION_TOPICS,
)

_log = logging.getLogger(__name__)

_LISTED_MAX = 20
_QUEUES_WANTED = 4
"""What clients request by default when their first message creates a topic."""

_MEANING = {
    "topics": "their settings are lost, and they are recovered from their messages",
    "groups": "their settings, such as limits of retries, are lost; groups that consume come back",
    "offsets": "all groups start where their own settings say, at the end or at the first message:"
    " restore the file from a copy before they do",
    "delay progress": "delayed messages whose delivered copies are not found in the log are"
    " delivered, perhaps for the second time",
}


def note_missing(missing: Iterable[Table], topics: Collection[str]) -> None:
    """Write missing tables; if there are messages of topics, first log what that means."""
    for table in missing:
        if SCHEDULE_TOPIC in topics if table.what == "delay progress" else topics:
            _log.error(
                "%s is missing or empty, and so is its backup, although the store has messages: %s",
                table.file.path,
                _MEANING[table.what],
            )
        table.changes += 1
        table.save_soon()


def recover_topics(topics: Topics, counts: Mapping[str, int], *, is_table_lost: bool) -> None:
    """Add the topics that have messages, but are not in the table; ``counts`` are their queues.

    A crash may come between the first message of a topic and the write of the table.
    """
    if not is_table_lost:
        counts = {name: max(count, _queues_wanted(name)) for name, count in counts.items()}
    recovered = topics.recover(counts)
    # Operators do not choose the queues of these, and Apache's brokers do not enter all of them.
    made = {name: each for name, each in recovered.items() if name not in TRANSACTION_TOPICS}
    if made:
        listed = [f"{name} ({each.read_queue_nums})" for name, each in made.items()]
        more = ", ..." if len(listed) > _LISTED_MAX else ""
        _log.warning(
            "recovered topics from their messages, to be read and written; check their numbers of"
            " queues: %s",
            ", ".join(listed[:_LISTED_MAX]) + more,
        )


def readable_queue(topics: Topics, name: str, queue_id: int) -> int:
    """Return the queue of a topic to store a delayed or half message in; add a missing topic.

    A crash before the write of the table leaves no queue to recover the topic from, since such a
    message is stored in its topic only when it is due, or committed. The topic may have fewer
    queues than when the message was sent: then another one takes it.
    """
    topic = topics.find(name)
    if topic is not None:
        queues = topic.read_queue_nums
        return queue_id % queues if 0 < queues <= queue_id else queue_id
    if not name.startswith(RETRY_PREFIX):
        # Heartbeats create retry topics, with as many queues as their group has.
        recover_topics(topics, {name: queue_id + 1}, is_table_lost=False)
    return queue_id


def queue_counts(queues: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return how many queues each topic must have, given topic and number of those in use."""
    counts: dict[str, int] = {}
    for name, queue_id in queues:
        counts[name] = max(counts.get(name, 0), queue_id + 1)
    return counts


def _queues_wanted(name: str) -> int:
    has_one = name.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)) or name in TRANSACTION_TOPICS
    return 1 if has_one else _QUEUES_WANTED
