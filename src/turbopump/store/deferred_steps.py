"""Writes that a start could not do on a full disk, done before messages are accepted."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable

Step = Callable[[], object]


class DeferredSteps:
    """Idempotent steps of a start, deferred in order until there is disk space."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self.error: OSError | None = None
        """Why steps are deferred; None if none is."""

    def attempt(self, step: Step) -> None:
        """Run a step, or defer it if the disk is full or an earlier step is deferred."""
        if self.error is None:
            try:
                step()
            except OSError as error:
                if not is_full(error):
                    raise
                self.error = error
            else:
                return
        self._steps.append(step)

    def finish(self) -> None:
        """Run the deferred steps; raises OSError if there is still no space."""
        while self._steps:
            try:
                self._steps[0]()
            except OSError as error:
                self.error = error
                raise
            self._steps.popleft()
        self.error = None


def is_full(error: OSError) -> bool:
    """Whether the error means no space, on the disk or within a quota."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT}
