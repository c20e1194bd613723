"""Which topics were removed, and where the log ended then.

Their messages stay in the log until it is deleted. A replay must not restore them: they would take
the offsets of those that were stored after the topic was re-created. Only Turbopump uses the file;
a Java broker ignores it.
"""

from __future__ import annotations

from pathlib import Path

from turbopump.machine.files import Files
from turbopump.message import PhysicalOffset
from turbopump.store.config_files import load_json, save_json


class RemovedTopics:
    """The position after the last message of each removed topic, kept on disk."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path = path
        self._files = files
        self._ends: dict[bytes, int] = {}
        self.has_any = False
        """Whether any topic was removed; a cheap first check."""

    def load(self) -> None:
        ends = load_json(self._files, self._path)
        if isinstance(ends, dict):
            self._ends = {
                topic.encode(): end
                for topic, end in ends.items()
                if isinstance(topic, str) and isinstance(end, int)
            }
            self.has_any = bool(self._ends)

    def covers(self, topic: bytes, position: int) -> bool:
        """Whether the message at a position was removed with its topic."""
        return position < self._ends.get(topic, 0)

    def end_of(self, topic: bytes) -> int:
        """Return the position after the last message that was removed with its topic, or 0."""
        return self._ends.get(topic, 0)

    def add(self, topic: bytes, log_min: PhysicalOffset, end: PhysicalOffset) -> None:
        """Record that a topic's messages up to a position are removed; durable on return."""
        kept = {other: known for other, known in self._ends.items() if known > log_min}
        self._replace({**kept, topic: end})

    def fit(self, log_min: PhysicalOffset, log_end: PhysicalOffset) -> None:
        """Follow a log that was cut: messages after its end are new, whatever their topic.

        Topics whose messages are all deleted from the log are dropped.
        """
        cut: dict[bytes, int] = {topic: min(end, log_end) for topic, end in self._ends.items()}
        ends = {topic: end for topic, end in cut.items() if end > log_min}
        if ends != self._ends:
            self._replace(ends)

    def _replace(self, ends: dict[bytes, int]) -> None:
        save_json(self._files, self._path, {topic.decode(): end for topic, end in ends.items()})
        self._ends = ends
        self.has_any = bool(ends)
