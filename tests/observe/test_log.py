"""JSON log lines."""

from __future__ import annotations

import json
import logging

import pytest

from kvbaton.observe.log import JsonFormatter, event


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
