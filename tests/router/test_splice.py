"""Events are told apart, however they arrive and whatever their text looks like."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.router.splice import decode_error, read_report, take_error, take_report, whole_events
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.openai_response import error_event
from kvbaton.workers.protocol import RequestReport

TEXT = b'data: {"choices":[{"text":": kvbaton {} data: {\\"error\\": \\n\\n"}]}\n\n'
REPORT = RequestReport("remote", 3, 0, 3, 2)
COMMENT = b": kvbaton " + msgspec.json.encode(REPORT) + b"\n\n"


@given(st.integers(0, len(TEXT) * 3))
def test_a_cut_falls_between_events(at: int) -> None:
    data = TEXT * 3
    whole, rest = whole_events(data[:at])
    assert whole + rest == data[:at] and len(whole) % len(TEXT) == 0 and len(rest) < len(TEXT)


def test_the_report_is_cut_out_wherever_it_is() -> None:
    for events in (COMMENT, COMMENT + TEXT, TEXT + COMMENT + TEXT):
        rest, report = take_report(events, None)
        assert report == REPORT and rest == events.replace(COMMENT, b"")
    assert take_report(TEXT, None) == (TEXT, None)
    assert read_report(None) is None
    assert read_report(msgspec.json.encode(REPORT).decode()) == REPORT


def test_an_error_ends_what_came_before_it() -> None:
    error = ApiError(503, "full", type="server_error", code="no_capacity")
    rest, found = take_error(TEXT + error_event(error))
    assert rest == TEXT and found is not None
    assert (found.code, found.message, found.type) == ("no_capacity", "full", "server_error")
    assert take_error(TEXT) == (TEXT, None)
    rest, found = take_error(error_event(error))
    assert rest == b"" and found is not None


def test_only_a_line_of_its_own_is_an_error() -> None:
    mark = b'data: {"error":{"message":"m"}}\n\n'
    for line in (b":", b"x", b": 0 1 "):
        assert take_error(TEXT + line + mark) == (TEXT + line + mark, None)
    rest, found = take_error(TEXT + b":x" + mark + mark)
    assert rest == TEXT + b":x" + mark and found is not None and found.message == "m"


def test_a_block_with_an_error_is_not_cut_in_two() -> None:
    """Else the line of the journal before it would be cut short, and another token would be in it."""
    rest, found = take_error(TEXT + b':0 12\ndata: {"error":{"message":"m"}}\n\n')
    assert rest == TEXT and found is not None


def test_what_is_no_error_object_is_not_shown() -> None:
    for raw in (b"", b"<html>10.0.0.7", b'{"error":"x"}', b"[1]"):
        error = decode_error(500, raw)
        assert error.status == 500 and error.message == "the worker answered 500"
    assert decode_error(302, b"").status == 502
