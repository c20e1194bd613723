"""Looking at, and changing, what goes over connections: signing, checking, measuring."""

from __future__ import annotations

from typing import Protocol

from turbopump.wire.command import Command


class Hook(Protocol):
    """Called around every request, on the side that sends it or on the side that serves it.

    Given to a connection or a pool it sees the requests that are sent; given to a router, those
    that are served. What it raises becomes the outcome of the request: on the serving side, the
    answer. Answers made from what a handler or a hook raised are not shown to hooks.
    """

    def before_request(self, address: str, command: Command) -> Command:
        """Return the request to go on with; ``address`` is the peer's.

        Another one, should it differ: the one given may be sent again as it is.
        """
        ...

    def after_response(self, address: str, request: Command, response: Command) -> None:
        """See an answer that came, or that is about to go out; one-way requests have none."""
        ...
