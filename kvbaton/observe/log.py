"""Log lines as JSON objects on stderr, one a line, so that a request's record can be found by a program.

Invariants: whoever logs never waits for whoever reads: a thread writes; what waits to be written is bounded, and what
does not fit is counted and said. Knows nothing about what is logged; a record's ``fields`` extra is merged into the
object.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from typing import Any, TextIO

import msgspec

_ENCODER = msgspec.json.Encoder(enc_hook=str)


class JsonFormatter(logging.Formatter):
    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        if record.exc_info:
            fields = {"exception": self.formatException(record.exc_info), **fields}
        return self.line(record.created, record.levelname.lower(), record.name, record.getMessage(), fields)

    def line(self, time_s: float, level: str, logger: str, message: str, fields: dict[str, Any]) -> str:
        return self.encoded(time_s, level, logger, message, fields).decode()

    def encoded(self, time_s: float, level: str, logger: str, message: str, fields: dict[str, Any]) -> bytes:
        """The line as it is written."""
        head: dict[str, Any] = {
            "time_s": round(time_s, 3),
            "level": level,
            "process": self._process_name,
            "logger": logger,
            "message": message,
        }
        head.update(fields)
        return _ENCODER.encode(head)


MAX_WAITING_LINES = 20_000  # some seconds of a busy router's records
GATHER_S = 0.05  # lines are written together: a write for each would cost more than making it


class LineWriter(logging.Handler):
    """Writes lines to a stream from a thread of its own."""

    def __init__(self, stream: TextIO, max_lines: int = MAX_WAITING_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._max_lines = max_lines
        self._lines: deque[bytes] = deque()
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
            self._lines.append(self.format(record).encode())
        except Exception:
            self.handleError(record)
        if not self._some.is_set():
            self._some.set()

    def add(self, logger: logging.Logger, message: str, fields: dict[str, Any]) -> None:
        """A line at info level, without all that ``logging`` does for one."""
        if len(self._lines) >= self._max_lines:
            self._num_lost += 1
            return
        assert isinstance(self.formatter, JsonFormatter)
        try:
            self._lines.append(self.formatter.encoded(time.time(), "info", logger.name, message, fields))
        except (TypeError, ValueError):  # no reason to fail whom the line tells of
            self._num_lost += 1
        if not self._some.is_set():
            self._some.set()

    def flush(self) -> None:
        """Write what is there now. At the end of the process ``logging`` calls it."""
        with self._writing:
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            lost, self._num_lost = self._num_lost, 0
            if lost:
                lines.append(_ENCODER.encode({"level": "error", "message": "log lines lost", "num": lost}))
            if lines:
                lines.append(b"")
                self._stream.write(b"\n".join(lines).decode())
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


_writer: LineWriter | None = None  # of this process, as soon as it is configured


def configure(process_name: str, level: str = "INFO") -> None:
    """Send everything from ``level`` up to stderr as JSON. For the entry point of a process only."""
    handler = LineWriter(sys.stderr)
    handler.setFormatter(JsonFormatter(process_name))
    global _writer
    _writer = handler
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # No line of ours shows them, and each costs a look at the stack or the process for every line.
    logging._srcfile = None  # type: ignore[attr-defined]
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def event(logger: logging.Logger, message: str, **fields: Any) -> None:
    """One structured line at info level."""
    if not logger.isEnabledFor(logging.INFO):
        return
    if _writer is not None and logging.root.handlers == [_writer]:
        _writer.add(logger, message, fields)
    else:
        logger.info(message, extra={"fields": fields})
