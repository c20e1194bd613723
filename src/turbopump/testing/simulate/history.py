"""The history of a run: every event in order, judged as it is added."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from turbopump.testing.simulate.events import US_PER_S, Event

Handler = Callable[[Any], Iterable[str] | None]
"""Judges an event of one type; returns what it violates."""

_Method = TypeVar("_Method", bound=Callable[..., Iterable[str] | None])


def on(*kinds: type[Event]) -> Callable[[_Method], _Method]:
    """Have a method of a `Follower` called with each event of these types."""

    def mark(method: _Method) -> _Method:
        vars(method)["kinds"] = kinds
        return method

    return mark


class Follower:
    """Follows a history by its methods that are marked with `on`."""

    name: str

    def handlers(self) -> Iterator[tuple[type[Event], Handler]]:
        """Return what is to be called with each event of a type."""
        for name, method in vars(type(self)).items():
            for kind in getattr(method, "kinds", ()):
                yield kind, getattr(self, name)


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated guarantee."""

    at_us: int
    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text} (at {self.at_us / US_PER_S:.6f} s)"


class History:
    """Stores events, and has the checks judge each of them."""

    def __init__(self, followers: Sequence[Follower] = ()) -> None:
        self.events: list[Event] = []
        self.violations: list[Violation] = []
        self.on_violation: Callable[[], object] = lambda: None
        self.is_closed = False
        """Whether nothing more is added: later events only end the run."""
        self._handlers: defaultdict[type[Event], list[tuple[str, Handler]]] = defaultdict(list)
        for follower in followers:
            for kind, handler in follower.handlers():
                self._handlers[kind].append((follower.name, handler))

    def add(self, event: Event) -> None:
        """Add an event; calls `on_violation` if it must not have happened."""
        if self.is_closed:
            return
        self.events.append(event)
        found = [
            Violation(event.at_us, name, text)
            for name, handler in self._handlers.get(type(event), ())
            for text in handler(event) or ()
        ]
        if found:
            self.violations += found
            self.on_violation()

    def lines(self) -> list[str]:
        """Return the events as text: time, process, event."""
        return [
            f"{event.at_us / US_PER_S:12.6f}  {event.who:<12}  {event}" for event in self.events
        ]

    def digest(self) -> str:
        """Return a digest that is equal only for equal histories."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()
