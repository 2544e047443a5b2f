"""Logging as text, or as one JSON object per line with a stable event name."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from bridge.plain import plain


class LogLevel(StrEnum):
    """Minimum level of logged messages."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """Format of a log line."""

    TEXT = "text"
    JSON = "json"


class Event(StrEnum):
    """Event names. Names and fields are stable; messages may change."""

    DAEMON_READY = "daemon_ready"
    DAEMON_STOPPED = "daemon_stopped"
    ENGINE_JOINED = "engine_joined"
    ROWS_DROPPED = "rows_dropped"
    MESSAGE_REFUSED = "message_refused"
    STORE_FULL = "store_full"
    STORE_FAILING = "store_failing"
    STORE_HAS_ROOM = "store_has_room"
    RECORDS_COLLECTED = "records_collected"
    DELETION_DEFERRED = "deletion_deferred"
    ROW_DAMAGED = "row_damaged"
    ENTRY_DAMAGED = "entry_damaged"
    HTTP_REQUEST = "http_request"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Logging:
    """Level and format of the log on stderr."""

    level: LogLevel = LogLevel.WARNING
    format: LogFormat = LogFormat.TEXT

    def start(self) -> None:
        """Configure logging of this process."""
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines() if self.format is LogFormat.JSON else _text())
        logging.basicConfig(level=self.level.value.upper(), handlers=[handler])


def event(name: Event, **fields: str | int | float | None) -> dict[str, Any]:
    """Return the ``extra`` argument of a log call: an event and its fields."""
    return {"event": name.value, "fields": fields}


class JsonLines(logging.Formatter):
    """One object per line: time, level, event, logger, message, then the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", Event.OTHER.value),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextLines(logging.Formatter):
    """One line per record, even if untrusted names contain line ends; a traceback follows."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return plain(super().formatMessage(record))


def _text() -> logging.Formatter:
    return TextLines("%(asctime)s %(levelname)s %(name)s: %(message)s")
