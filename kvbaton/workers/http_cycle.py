"""One request on a connection and its answer, with direct calls where ASGI would pass messages.

What a router does between two sockets takes so little time that dicts, tasks and events for each message showed in its
profile. An app that knows nothing of this still gets plain ASGI. Invariants: the head of an answer leaves together with
the first part of its body; nothing is written while the client does not read, nor after it went away; who registered
for it is told at once when the client goes. Knows nothing about paths or errors.
"""

from __future__ import annotations

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

SCOPE_KEY = "kvbaton.cycle"


class Cycle(RequestResponseCycle):
    """uvicorn's, and a shorter way through it."""

    on_gone: Callable[[], None] | None = None  # called when the connection is lost before the answer is complete
    _head = b""

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
        self.message_event.set()
        if self.on_gone is not None:
            self.on_gone()

    def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Kept until the first part of the body."""
        assert not self.response_started, "an answer begins once"
        self.response_started = True
        self.waiting_for_100_continue = False
        self.chunked_encoding = status not in (204, 304)  # these have no body, however it might be marked
        lines = [STATUS_LINE[status]]
        for name, value in [*self.default_headers, *headers]:
            if name == b"content-length":
                self.expected_content_length = int(value)
                self.chunked_encoding = False
            elif name == b"connection" and value == b"close":
                self.keep_alive = False
                continue
            lines.append(b"%b: %b\r\n" % (name, value))
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if self.chunked_encoding:
            lines.append(b"transfer-encoding: chunked\r\n")
        self._head = b"".join(lines)
        if self._head.count(b"\n") != len(lines) or self._head.count(b"\r") != len(lines):
            raise RuntimeError("a header of the answer has a line break")
        self._head += b"\r\n"

    async def put(self, part: bytes, more: bool) -> None:
        """Write a part of the body, or the last of it."""
        while self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        assert self.response_started and not self.response_complete, "parts come between the beginning and the end"
        if self.scope["method"] == "HEAD":
            part, self.expected_content_length = b"", 0
        elif not self.chunked_encoding:
            self.expected_content_length -= len(part)
            if self.expected_content_length < 0 or (self.expected_content_length and not more):
                raise RuntimeError("the body is not as long as its head says")
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
