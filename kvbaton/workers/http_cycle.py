"""One request on a connection and its answer, with direct calls where ASGI would pass messages.

What a router does between two sockets takes so little time that dicts, tasks and events for each message showed in its
profile. An app that knows nothing of this still gets plain ASGI. Invariants: the head of an answer leaves together with
the first part of its body; nothing is written while the client does not read, nor after it went away; who registered
for it is told at once when the client goes. Knows nothing about paths or errors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

SCOPE_KEY = "kvbaton.cycle"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b"3\r\n:\n\n\r\n"  # of an event stream, as a chunk: says nothing
_log = logging.getLogger("uvicorn.error")


class Cycle(RequestResponseCycle):
    """uvicorn's, and a shorter way through it."""

    on_gone: Callable[[], None] | None = None  # called when the connection is lost before the answer is complete
    _head = b""
    _is_event_stream = False
    _until_close = False  # the end of the connection ends the answer
    # Where each begins; set on a request's own when it changes.
    access_log = disconnected = waiting_for_100_continue = response_started = response_complete = False
    more_body = True
    chunked_encoding = None
    expected_content_length = 0

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        transport: asyncio.Transport,
        flow: FlowControl,
        default_headers: list[tuple[bytes, bytes]],
        keep_alive: bool,
        on_response: Callable[..., None],
    ) -> None:
        self.scope = scope  # type: ignore[assignment]
        self.transport = transport
        self.flow = flow
        self.logger = self.access_logger = _log
        self.default_headers = default_headers
        self.message_event = asyncio.Event()
        self.on_response = on_response
        self.keep_alive = keep_alive
        self.body = bytearray()

    def take_body(self) -> bytes | None:
        """The whole body if it is here already; None: it has to be waited for."""
        if self.more_body or self.disconnected or self.response_complete:
            return None
        body, self.body = bytes(self.body), bytearray()
        self.message_event.clear()
        self.flow.resume_reading()
        return body

    def lost(self) -> None:
        self.disconnected = True
        self.waiting_for_100_continue = False  # who still waits for the body asks for it no more
        self.message_event.set()
        if self.on_gone is not None:
            self.on_gone()

    def probe(self) -> None:
        """Write what means nothing to a client that has only stopped sending, and makes one that left say so."""
        if self.flow.write_paused or self.response_complete or self.disconnected:
            return
        if not self.response_started:
            self.transport.write(CONTINUE)
        elif self._is_event_stream and not self._head:
            self.transport.write(COMMENT)

    def begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Kept until the first part of the body."""
        assert not self.response_started, "an answer begins once"
        self.response_started = True
        self.waiting_for_100_continue = False
        # Some have no body, however it might be marked; and old clients read until the connection ends.
        chunked = status not in (204, 304) and self.scope["http_version"] != "1.0"
        measured = False
        lines = [STATUS_LINE[status]]
        for name, value in (*self.default_headers, *headers):
            if name == b"content-length":
                self.expected_content_length = int(value)
                chunked, measured = False, True
            elif name == b"connection" and value == b"close":
                self.keep_alive = False
                continue
            elif name == b"content-type":
                self._is_event_stream = value.startswith(b"text/event-stream")
            lines += (name, b": ", value, b"\r\n")
        self.chunked_encoding = chunked
        self._until_close = not measured and self.scope["http_version"] == "1.0"
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)
        num_lines = len(headers) + len(self.default_headers) + 2 + chunked
        if self._head.count(b"\n") > num_lines or self._head.count(b"\r") > num_lines:
            self._check_lines([*self.default_headers, *headers])

    @staticmethod
    def _check_lines(headers: list[tuple[bytes, bytes]]) -> None:
        if any(b"\r" in each or b"\n" in each for header in headers for each in header):
            raise RuntimeError("a header of the answer has a line break")

    def put_now(self, part: bytes, more: bool) -> bool:
        """Write a part of the body, or the last of it. False, and nothing happened, when the client does not read."""
        if self.flow.write_paused and not self.disconnected:
            return False
        if self.disconnected:
            return True
        assert self.response_started and not self.response_complete, "parts come between the beginning and the end"
        if self.scope["method"] == "HEAD":
            part, self.expected_content_length = b"", 0
        elif not self.chunked_encoding:
            self._measure(part, more)
        elif part:
            part = b"%x\r\n%b\r\n%b" % (len(part), part, b"" if more else b"0\r\n\r\n")
        elif not more:
            part = b"0\r\n\r\n"
        if self._head:
            part, self._head = self._head + part, b""
        if part:
            self.transport.write(part)
        if not more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()
        return True

    def _measure(self, part: bytes, more: bool) -> None:
        if self._until_close:
            return
        self.expected_content_length -= len(part)
        if self.expected_content_length < 0 or (self.expected_content_length and not more):
            raise RuntimeError("the body is not as long as its head says")

    async def put(self, part: bytes, more: bool) -> None:
        """The same, when the client reads again."""
        while not self.put_now(part, more):
            await self.flow.drain()
