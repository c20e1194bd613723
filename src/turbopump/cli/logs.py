"""What servers log, and how: lines for people, or one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class LogLevel(StrEnum):
    """The least severe messages that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """The form of a line."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What ``--log-level`` and ``--log-format`` say."""

    level: LogLevel = LogLevel.INFO
    format: LogFormat = LogFormat.TEXT


def configure_logging(log: LogSettings) -> None:
    """Log to stderr from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log.format is LogFormat.JSON else TEXT_LINES)
    logging.basicConfig(level=log.level.name, handlers=[handler])


TEXT_LINES = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, message and, if any, exception."""

    def format(self, record: logging.LogRecord) -> str:
        value = {
            "time": datetime.fromtimestamp(record.created)
            .astimezone()
            .isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            value["exception"] = self.formatException(record.exc_info)
        return json.dumps(value)
