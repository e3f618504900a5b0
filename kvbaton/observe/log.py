"""Log lines as JSON objects on stderr, one a line, so that a request's record can be found by a program.

Invariants: whoever logs never waits for whoever reads: a thread writes; what waits to be written is bounded, and what
does not fit is counted and said. Knows nothing about what is logged; a record's ``fields`` extra is merged into the
object.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from typing import Any, TextIO

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


MAX_WAITING_LINES = 20_000  # some seconds of a busy router's records
GATHER_S = 0.05  # lines are written together: a write for each would cost more than making it


class LineWriter(logging.Handler):
    """Writes lines to a stream from a thread of its own."""

    def __init__(self, stream: TextIO, max_lines: int = MAX_WAITING_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._max_lines = max_lines
        self._lines: deque[str] = deque()
        self._num_lost = 0
        self._writing = threading.Lock()
        self._some = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) >= self._max_lines:
            self._num_lost += 1
            return
        try:
            self._lines.append(self.format(record))
        except Exception:
            self.handleError(record)
        if not self._some.is_set():
            self._some.set()

    def flush(self) -> None:
        """Write what is there now. At the end of the process ``logging`` calls it."""
        with self._writing:
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            lost, self._num_lost = self._num_lost, 0
            if lost:
                lines.append(_ENCODER.encode({"level": "error", "message": "log lines lost", "num": lost}).decode())
            if lines:
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()

    def close(self) -> None:
        self._ended.set()
        self._some.set()
        self._thread.join(timeout=1.0)
        super().close()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._some.wait()
            self._ended.wait(GATHER_S)
            self._some.clear()
            try:
                self.flush()
            except (OSError, ValueError):
                return  # nobody reads any more; what cannot be written is counted from here on


def configure(process_name: str, level: str = "INFO") -> None:
    """Send everything from ``level`` up to stderr as JSON. For the entry point of a process only."""
    handler = LineWriter(sys.stderr)
    handler.setFormatter(JsonFormatter(process_name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # No line of ours shows them, and each costs a look at the stack or the process for every line.
    logging._srcfile = None  # type: ignore[attr-defined]
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def event(logger: logging.Logger, message: str, **fields: Any) -> None:
    """One structured line at info level."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(message, extra={"fields": fields})
