"""Logs for people or for machines: text, or one JSON object a line with a stable event name."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from bridge.plain import plain


class LogLevel(StrEnum):
    """How much to log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How a line looks."""

    TEXT = "text"
    JSON = "json"


class Event(StrEnum):
    """What happened. Names and their fields stay; sentences may change."""

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
    """What to log to stderr, and how."""

    level: LogLevel = LogLevel.WARNING
    format: LogFormat = LogFormat.TEXT

    def start(self) -> None:
        """Set up this process's logging."""
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines() if self.format is LogFormat.JSON else _text())
        logging.basicConfig(level=self.level.value.upper(), handlers=[handler])


def event(name: Event, **fields: str | int | float | None) -> dict[str, Any]:
    """Return the ``extra`` of a log call: which event it tells and what is known of it."""
    return {"event": name.value, "fields": fields}


class JsonLines(logging.Formatter):
    """One object a line: time, level, event, logger, message, then the event's own fields."""

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
    """One line a record, whatever names of strangers are in it; a traceback follows on its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return plain(super().formatMessage(record))


def _text() -> logging.Formatter:
    return TextLines("%(asctime)s %(levelname)s %(name)s: %(message)s")
