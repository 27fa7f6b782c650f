"""Logs of our own processes: text for people, or one JSON object a line for machines.

Fields: time (UTC), level, logger, message, replica, request_id, exception, and whatever a record was given as `extra`.
A record with a `request_id` of its own (that of a generation, as the API answers it) shows the one that the client
sent as X-Request-Id beside it, as `client_request_id`. No record holds a prompt or generated text.
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

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)  # of the request that is being served

_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def configure_logging(log_format: str, *, replica: str | None = None, level: int = logging.INFO) -> None:
    """Send this process's own records to stderr in a format of `LOG_FORMATS`; may be called again."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(replica) if log_format == "json" else TextFormatter(replica))
    logger = logging.getLogger(ROOT_LOGGER)
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False  # a handler of the root logger would show everything twice


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

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
    """A line for people: the message, then the record's fields as name=value."""

    def __init__(self, replica: str | None = None) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._replica = replica

    def formatMessage(self, record: logging.LogRecord) -> str:  # the base class adds tracebacks after it
        fields = [f"{name}={value}" for name, value in _fields(record, self._replica).items()]
        return " ".join([super().formatMessage(record), *fields])


def _fields(record: logging.LogRecord, replica: str | None) -> dict[str, Any]:
    """Return replica, request ids and extras, those that are known."""
    extras = {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD_ATTRIBUTES and not name.startswith("_")  # Ray hides some of its own there
    }
    serving = request_id.get()
    known = {"replica": replica, "request_id": serving, **extras}
    if known["request_id"] != serving:
        known["client_request_id"] = serving
    return {name: value for name, value in known.items() if value is not None}
