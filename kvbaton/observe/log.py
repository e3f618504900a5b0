"""Log lines as JSON objects on stderr, one a line, so that a request's record can be found by a program.

Knows nothing about what is logged; a record's ``fields`` extra is merged into the object.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec

_ENCODER = msgspec.json.Encoder(enc_hook=str)


class JsonFormatter(logging.Formatter):
    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time_s": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line.update(getattr(record, "fields", {}))
        return _ENCODER.encode(line).decode()


def configure(process_name: str, level: str = "INFO") -> None:
    """Send everything from ``level`` up to stderr as JSON. For the entry point of a process only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process_name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def event(logger: logging.Logger, message: str, **fields: Any) -> None:
    """One structured line at info level."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(message, extra={"fields": fields})
