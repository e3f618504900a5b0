"""A worker's event stream on its way to the client: whole events only, our own comments cut out, nothing re-encoded.

Pure functions over bytes. Text cannot look like a comment or like the end of an event: JSON strings hold no bare
newline. Knows nothing about sockets.
"""

from __future__ import annotations

import msgspec

from kvbaton.types import UNREADABLE
from kvbaton.workers.journal import BadStream
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.openai_response import DONE, ERROR_MARK, REPORT_PREFIX
from kvbaton.workers.protocol import RequestReport

_REPORT = msgspec.json.Decoder(RequestReport)
_ERROR = msgspec.json.Decoder(dict[str, dict[str, object]])

_NEWLINE = ord("\n")


def whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Whole SSE events, and the beginning of one that is not complete."""
    if data.endswith(b"\n\n"):
        return data, b""
    cut = data.rfind(b"\n\n") + 2
    return (data[:cut], data[cut:]) if cut > 1 else (b"", data)


def until_end(events: bytes) -> tuple[bytes, bool]:
    """Whole events up to the end mark, and whether it is there. What a worker sends behind it is nobody's."""
    at = events.find(DONE)
    while at > 0 and events[at - 1] != _NEWLINE:  # the words occur inside an event
        at = events.find(DONE, at + 1)
    return (events, False) if at < 0 else (events[: at + len(DONE)], True)


def take_report(events: bytes, known: RequestReport | None) -> tuple[bytes, RequestReport | None]:
    """Cut the worker's report out of whole events."""
    start = 0 if events.startswith(REPORT_PREFIX) else events.find(b"\n\n" + REPORT_PREFIX) + 2
    if start == 1:  # not found: the words occur inside an event
        return events, known
    stop = events.index(b"\n\n", start) + 2
    return events[:start] + events[stop:], read_report(events[start + len(REPORT_PREFIX) : stop])


def read_report(raw: bytes | None) -> RequestReport | None:
    """Raises BadStream."""
    try:
        return _REPORT.decode(raw) if raw is not None else None
    except UNREADABLE as error:
        raise BadStream(f"a worker's report makes no sense: {error}") from None


def take_error(events: bytes) -> tuple[bytes, ApiError | None]:
    """The events before an error event, and the error. A stream has at most one, and nothing follows it.

    Whatever else its block holds goes with it.
    """
    at = events.find(ERROR_MARK)
    while at > 0 and events[at - 1] != _NEWLINE:  # the words occur inside a line
        at = events.find(ERROR_MARK, at + 1)
    if at < 0:
        return events, None
    stop = events.index(b"\n\n", at)
    block = events.rfind(b"\n\n", 0, at) + 2 if b"\n\n" in events[:at] else 0
    return events[:block], decode_error(502, events[at + len(b"data: ") : stop])


def decode_error(status: int, raw: bytes) -> ApiError:
    """A worker's error as it wrote it; what is not in OpenAI's shape is not shown."""
    try:
        error = _ERROR.decode(raw)["error"]
    except (*UNREADABLE, KeyError):
        error = {}
    texts = {key: str(value) for key, value in error.items() if value is not None}
    return ApiError(
        status if 400 <= status < 600 else 502,
        texts.get("message", f"the worker answered {status}"),
        type=texts.get("type", "server_error"),
        param=texts.get("param"),
        code=texts.get("code"),
    )
