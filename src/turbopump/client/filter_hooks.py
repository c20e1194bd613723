"""Hooks that choose among pulled messages, before listeners or callers get them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from turbopump.message import MessageQueue
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)


class FilterHook(Protocol):
    """Chooses among pulled messages, on the event loop; the group skips the others.

    ::

        class OnlyOurs:
            def keeps(self, group, message, queue):
                return message.properties.get("region") == "eu"
    """

    def keeps(self, group: str, message: MessageView, queue: MessageQueue) -> bool:
        """Return whether to deliver a message; an exception is logged and delivers it."""


def kept(
    hooks: Iterable[FilterHook], group: str, messages: Sequence[MessageView], queue: MessageQueue
) -> Sequence[MessageView]:
    """Return the messages that all hooks keep."""
    for hook in hooks:
        messages = [each for each in messages if _keeps(hook, group, each, queue)]
    return messages


def _keeps(hook: FilterHook, group: str, message: MessageView, queue: MessageQueue) -> bool:
    try:
        return bool(hook.keeps(group, message, queue))
    except BaseException:  # noqa: BLE001 - the user's code: sys.exit would end the event loop
        # Skipping it would lose it.
        _log.exception("keeps of %r failed for %s", hook, message.message_id)
        return True
