"""Hooks that see and change requests: for signing, checking, measuring."""

from __future__ import annotations

from typing import Protocol

from turbopump.wire.command import Command


class Hook(Protocol):
    """Called around every request, on the sending or on the serving side.

    A hook of a connection or a pool sees the requests that are sent, a hook of a router those that
    are served. What it raises becomes the outcome of the request: on the serving side, the answer.
    Hooks do not see error answers made from an exception. Hooks of a `BlockingPool` are called on
    the threads that send, several at a time.
    """

    def before_request(self, address: str, command: Command) -> Command:
        """Return the request to send or serve; ``address`` is the peer's.

        Return a copy to change it: the request passed in may be sent again.
        """

    def after_response(self, address: str, request: Command, response: Command) -> None:
        """See a response that was received, or is about to be sent; one-way requests have none."""
