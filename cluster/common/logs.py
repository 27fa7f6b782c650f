"""Logs of our own processes: text, or one JSON object per line.

Fields: time (UTC), level, logger, message, replica, request_id, exception, and a record's `extra`. If a record has its
own `request_id` (the generation's, as in the API's answer), the client's X-Request-Id is `client_request_id`. No record
has a prompt or generated text.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

LOG_FORMATS = ("text", "json")
ROOT_LOGGER = "outrider"

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)  # of the current task's request

_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def configure_logging(log_format: str, *, replica: str | None = None, level: int = logging.INFO) -> None:
    """Log this process's own records to stderr, in a format of `LOG_FORMATS`; may be called again."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(replica) if log_format == "json" else TextFormatter(replica))
    logger = logging.getLogger(ROOT_LOGGER)
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False  # a handler of the root logger would show records twice


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, replica: str | None = None) -> None:
        super().__init__()
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record, self._replica),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """A line of text: the message, then the record's fields as name=value."""

    def __init__(self, replica: str | None = None) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._replica = replica

    def formatMessage(self, record: logging.LogRecord) -> str:  # the base class appends tracebacks
        fields = [f"{name}={value}" for name, value in _fields(record, self._replica).items()]
        return " ".join([super().formatMessage(record), *fields])


def _fields(record: logging.LogRecord, replica: str | None) -> dict[str, Any]:
    """Return the known ones of replica, request ids and extras."""
    extras = {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD_ATTRIBUTES and not name.startswith("_")  # Ray adds private ones
    }
    serving = request_id.get()
    known = {"replica": replica, "request_id": serving, **extras}
    if known["request_id"] != serving:
        known["client_request_id"] = serving
    return {name: value for name, value in known.items() if value is not None}
