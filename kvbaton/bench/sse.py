"""Server-sent events, split at any byte boundary, and what an OpenAI-style chunk says.

Invariants: the same bytes give the same events however they were cut into reads; an event carries the instant of the
read that completed it, taken by the caller before parsing, so the cost of parsing never shows in a time.

Knows nothing about sockets, clocks or statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgspec

from kvbaton.types import UNREADABLE

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One dispatched event. ``name`` is empty unless the server sent an ``event:`` field."""

    name: str
    data: bytes


class SSEParser:
    """Incremental parser of the event-stream format: LF, CR and CRLF, comments, multi-line data, a leading BOM."""

    __slots__ = ("_data", "_first_line", "_name", "_pending", "_skip_lf", "num_comments")

    def __init__(self) -> None:
        self._pending = b""
        self._skip_lf = False
        self._first_line = True
        self._name = ""
        self._data: list[bytes] = []
        self.num_comments = 0

    def feed(self, data: bytes) -> list[Event]:
        """Events completed by these bytes."""
        if self._skip_lf and data:
            # The CR that ended the previous read was a line end already; its LF may only be swallowed.
            self._skip_lf = False
            if data[0] == 0x0A:
                data = data[1:]
        if b"\r" in data:
            self._skip_lf = data[-1] == 0x0D
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in data:
            self._pending += data
            return []
        *lines, self._pending = (self._pending + data).split(b"\n")
        events: list[Event] = []
        for line in lines:
            if line:
                self._line(line)
            elif self._data:
                events.append(Event(self._name, self._data[0] if len(self._data) == 1 else b"\n".join(self._data)))
                self._data = []
                self._name = ""
            else:
                self._name = ""
        return events

    def close(self) -> list[Event]:
        """The event the stream ended in the middle of, if any. The format says to drop it; the caller decides."""
        if self._pending:
            self._line(self._pending)
            self._pending = b""
        if not self._data:
            return []
        event = Event(self._name, b"\n".join(self._data))
        self._data = []
        return [event]

    def _line(self, line: bytes) -> None:
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(_BOM)
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            return
        if line.startswith(b":"):
            self.num_comments += 1
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            self._name = value.decode("utf-8", "replace")
        elif name == b"data":
            self._data.append(value)


class ChunkKind(IntEnum):
    """What one event was. Only CONTENT, REASONING and TOOL are output that a user sees arrive."""

    ROLE = 0  # first delta with a role, or any delta without visible output
    CONTENT = 1
    REASONING = 2
    TOOL = 3
    FINISH = 4  # carries a finish reason and no output
    USAGE = 5  # usage and no choices
    DONE = 6
    ERROR = 7


VISIBLE = frozenset((ChunkKind.CONTENT, ChunkKind.REASONING, ChunkKind.TOOL))


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class _ChatLogprobs(msgspec.Struct):
    content: list[Any] | None = None
    tokens: list[Any] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _ChatLogprobs | None = None
    token_ids: list[int] | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts as the server states them. ``completion_tokens`` already contains the reasoning tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    completion_tokens_details: _CompletionDetails | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    # What engines put at the top level when they report an error without an ``error`` object.
    object: str | None = None
    message: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class Chunk:
    """One event of a stream, with the instant of the read that completed it."""

    time_s: float
    kind: ChunkKind
    text: str = ""
    num_tokens: int | None = None  # by the chunk's own token ids or logprobs; None: not stated
    total_tokens: int | None = None  # output tokens so far, by the usage the event carries; None: no usage in it


@dataclass(slots=True)
class StreamReader:
    """Everything one streamed answer said, chunk by chunk.

    ``error`` is set for an error event, a malformed chunk, or an early end; such a stream is a failure even when the
    status was 200 and tokens had arrived.
    """

    chunks: list[Chunk] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: str | None = None
    done: bool = False
    error: str | None = None
    _parser: SSEParser = field(default_factory=SSEParser)

    def feed(self, data: bytes, time_s: float) -> int:
        """Reads bytes that arrived at ``time_s``; returns how many visible chunks they completed."""
        visible = 0
        for event in self._parser.feed(data):
            visible += self._event(event, time_s)
        return visible

    def close(self, time_s: float) -> None:
        """The body ended. Without a finish reason or [DONE] that is a failure: the tail of the answer is missing."""
        for event in self._parser.close():
            self._event(event, time_s)
        if self.error is None and not self.done and self.finish_reason is None:
            self.error = "early end: the stream closed without a finish reason or [DONE]"

    @property
    def num_comments(self) -> int:
        return self._parser.num_comments

    def _event(self, event: Event, time_s: float) -> int:
        data = event.data.strip()
        if not data:
            return 0
        if data == b"[DONE]":
            self.done = True
            self.chunks.append(Chunk(time_s, ChunkKind.DONE))
            return 0
        try:
            chunk = _decoder.decode(data)
        except UNREADABLE as error:
            self._fail(time_s, data if event.name == "error" else f"malformed chunk: {error}")
            return 0
        if chunk.error is not None or event.name == "error" or chunk.object == "error":
            self._fail(time_s, chunk.error if chunk.error is not None else data)
            return 0
        if chunk.usage is not None:
            self.usage = chunk.usage
        return self._choices(chunk, time_s)

    def _choices(self, chunk: _Chunk, time_s: float) -> int:
        total = chunk.usage.completion_tokens if chunk.usage is not None else None
        if not chunk.choices:
            self.chunks.append(Chunk(time_s, ChunkKind.ROLE if total is None else ChunkKind.USAGE, total_tokens=total))
            return 0
        visible = 0
        for choice in chunk.choices:
            kind, text = _output_of(choice)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
                if kind is ChunkKind.ROLE:
                    kind = ChunkKind.FINISH
            self.chunks.append(Chunk(time_s, kind, text, _stated_tokens(choice), total))
            visible += kind in VISIBLE
        return visible

    def _fail(self, time_s: float, reason: Any) -> None:
        self.chunks.append(Chunk(time_s, ChunkKind.ERROR))
        if self.error is None:
            self.error = f"error event: {_error_text(reason)}"


def _output_of(choice: _Choice) -> tuple[ChunkKind, str]:
    """An empty string or null is never output; reasoning is output, of another kind than the answer."""
    if choice.text:
        return ChunkKind.CONTENT, choice.text
    delta = choice.delta
    if delta is None:
        return ChunkKind.ROLE, ""
    if delta.content:
        return ChunkKind.CONTENT, delta.content
    reasoning = delta.reasoning_content or delta.reasoning
    if reasoning:
        return ChunkKind.REASONING, reasoning
    if delta.refusal:
        return ChunkKind.CONTENT, delta.refusal
    if delta.tool_calls:
        return ChunkKind.TOOL, _tool_text(delta.tool_calls)
    return ChunkKind.ROLE, ""


def _stated_tokens(choice: _Choice) -> int | None:
    if choice.token_ids:
        return len(choice.token_ids)
    if choice.logprobs is not None:
        return len(choice.logprobs.content or choice.logprobs.tokens or ()) or None
    return None


def _tool_text(calls: list[Any]) -> str:
    parts = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts.append(f"{function.get('name') or ''}{function.get('arguments') or ''}")
    return "".join(parts)


def _error_text(reason: Any) -> str:
    if isinstance(reason, bytes):
        return reason.decode("utf-8", "replace")[:300]
    if isinstance(reason, dict):
        return str(reason.get("message") or reason)[:300]
    return str(reason)[:300]
