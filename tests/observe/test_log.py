"""JSON log lines."""

from __future__ import annotations

import io
import json
import logging
import threading

import pytest

from kvbaton.observe.log import JsonFormatter, LineWriter, event


def test_a_record_is_one_json_object(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("kvbaton.test")
    with caplog.at_level(logging.INFO, logger="kvbaton.test"):
        event(logger, "request", outcome="ok", terms={"a": 1.5}, odd=object)
        try:
            raise ValueError("x\ny")
        except ValueError:
            logger.exception("broken %s", "pipe")
    formatter = JsonFormatter("router")
    lines = [formatter.format(record) for record in caplog.records]
    assert all("\n" not in line for line in lines)
    first, second = map(json.loads, lines)
    assert (first["message"], first["outcome"], first["terms"], first["process"]) == (
        "request",
        "ok",
        {"a": 1.5},
        "router",
    )
    assert second["message"] == "broken pipe" and "ValueError" in second["exception"] and second["level"] == "error"


class Stuck(io.StringIO):
    """A pipe nobody reads, until somebody does."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.reads = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.reads.wait()
        return super().write(text)


def test_who_logs_never_waits_for_who_reads_and_what_waits_is_bounded() -> None:
    stream = Stuck()
    writer = LineWriter(stream, max_lines=5)
    writer.setFormatter(JsonFormatter("router"))

    def log(number: int) -> None:
        writer.handle(logging.makeLogRecord({"msg": f"line {number}", "levelname": "INFO"}))

    log(0)
    stream.entered.wait()  # the thread is in the middle of writing
    for number in range(1, 9):
        log(number)
    stream.reads.set()
    writer.flush()
    writer.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == [*(f"line {number}" for number in range(6)), "log lines lost"]
    assert lines[-1]["num"] == 3


def test_an_event_of_a_configured_process_is_the_line_that_logging_would_have_made() -> None:
    stream = io.StringIO()
    writer = LineWriter(stream)
    writer.setFormatter(JsonFormatter("router"))
    fields = {"outcome": "ok", "terms": {"a": 1.5}, "odd": object}
    logger = logging.getLogger("kvbaton.test")
    writer.add(logger, "request", fields)
    writer.add(logger, "request", {"no text": "\udc80"})
    made = logging.makeLogRecord({"name": "kvbaton.test", "msg": "request", "levelname": "INFO", "fields": fields})
    writer.handle(made)
    writer.close()
    writer.flush()
    quick, usual, lost = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert quick.pop("time_s") > 1e9 and usual.pop("time_s") > 1e9
    assert quick == usual
    assert (lost["message"], lost["num"]) == ("log lines lost", 1)
