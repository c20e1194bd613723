"""Shared by all checks."""

from __future__ import annotations

from turbopump.testing.simulate.history import Follower
from turbopump.testing.simulate.ledger import Ledger


class Check(Follower):
    """One invariant."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
