"""A connection: how much a request may say before its body and how long it may take for it, and what is answered when
there is no request to answer.

uvicorn's parser keeps headers of any size. Here the request line and the headers together are bounded (431), whether
they come at once, in many lines or in one line without end; and what is not HTTP gets a 400 in the shape of every
other error. A head that is not complete in time ends the connection (408, or without a word when nothing came), so that
nobody holds connections for nothing. After such an answer the connection is closed, but only when the client has
stopped sending or some time has passed: closing under its bytes would reset the connection, and the answer with it.

Requests that come before the answer to an earlier one wait for their turn, so many of them and no more (400): each
takes more memory than its bytes. Nothing that refuses a later one is said before the earlier ones have their answers.
An offer to speak another protocol is declined by answering in this one.

Where ``half_closes`` is set, a client that stops sending after its request still gets its answer; one that closed
altogether looks the same until something is written to it. So something meaningless is, and the socket says then
which it is. Elsewhere it has left: a worker's clients are routers, and those want no work done for nobody.

Each request becomes a ``Cycle``. Knows nothing about paths, bodies or models.
"""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvbaton.workers.http_cycle import SCOPE_KEY, Cycle
from kvbaton.workers.openai_errors import ApiError

MAX_HEAD_BYTES = 32 * 1024
HEAD_TIMEOUT_S = 20.0  # of a first request's head since the connection, of a later one's since its first byte
LINGER_S = 1.0
MAX_WAITING = 128  # requests of one connection that wait for their turn
FIRST_LOOK_S, LONGEST_LOOK_S = 0.005, 0.25  # whether a client that sends no more is still there


class _TooLarge(Exception):
    """Ends the parser's work in the middle of a head."""


class _TooMany(Exception):
    """Ends the parser's work behind a head."""


class _Behind:
    """What a second parser tells of a request whose head the first has told."""

    def __init__(self, protocol: BoundedHeadProtocol) -> None:
        self._protocol = protocol
        self.in_known_head = True
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        if not self.in_known_head:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.in_known_head:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_known_head:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.in_known_head:
            self._protocol.on_headers_complete()
        self.in_known_head = False


class BoundedHeadProtocol(HttpToolsProtocol):
    """uvicorn's connection with bounds on each request's head."""

    head_timeout_s = HEAD_TIMEOUT_S
    half_closes = False  # whether a client that sends no more may still want its answer
    _head_bytes = 0  # of the lines of this request that are complete
    _open_bytes = 0  # received since the parser last made something of them
    _refused = False
    _last_words = b""  # the refusal, while earlier requests are served
    _too_many = False  # requests that wait for their turn
    _half_closed = False  # the client sends no more
    _serving: Cycle | None = None  # ``cycle`` is the last one that was parsed, which may have to wait for it
    # One timer for the connection's whole life: it is moved when it rings, not at every request.
    _timer: asyncio.TimerHandle | None = None
    _quiet_since_s = 0.0  # connected, or the last answer was complete, or a head began
    _in_head = True  # a head is due: it has begun, or it is the first of the connection
    _begun = False  # some of it came

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._quiet_since_s = self.loop.time()
        self._timer = self.loop.call_later(self._look_s, self._look_at_clock)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._open_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("")
            return
        if self._head_bytes + self._open_bytes > MAX_HEAD_BYTES and not self._refused:
            self._refuse(_headers_too_large())

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offered:
                # The parser takes the head for the whole request then, and what follows for the other protocol.
                data = data[offered.args[0] :]
            self.parser = httptools.HttpRequestParser(_Behind(self))
            lines = [b"%b: %b\r\n" % each for each in self.headers if each[0] in _FRAMING]
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines))

    def on_message_begin(self) -> None:
        self._open_bytes = self._head_bytes = 0
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._begun = True
        if not self._in_head:
            self._in_head, self._quiet_since_s = True, self.loop.time()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._open_bytes = 0
        self._head_bytes += len(name) + len(value) + 4  # a colon, a space and the end of the line
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _TooLarge
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._open_bytes = self._head_bytes = 0  # what is counted from here on are trailers
        self._in_head = self._begun = False
        parser, url, query = self.parser, self.url, b""
        if not url.startswith(b"/") or b"?" in url or b"#" in url:
            parsed = httptools.parse_url(url)
            url, query = parsed.path, parsed.query or b""
        path = url.decode("ascii")
        version = parser.get_http_version()
        scope: dict[str, Any] = {
            "type": "http",
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "query_string": query,
            "headers": self.headers,
        }
        before: Cycle | None = self.cycle  # type: ignore[assignment]
        self.scope = scope  # type: ignore[assignment]
        self.cycle = scope[SCOPE_KEY] = Cycle(
            scope,
            self.transport,
            self.flow,
            self.server_state.default_headers,
            version != "1.0" and parser.should_keep_alive(),
            self.on_response_complete,
        )
        self.cycle.waiting_for_100_continue = self.expect_100_continue
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:  # one at a time, in order
            if len(self.pipeline) >= MAX_WAITING:
                self._too_many = True
                raise _TooMany
            self.pipeline.appendleft((self.cycle, self.app))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._serving = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        elif self._last_words:
            self._say_last_words()
        elif self._half_closed:
            self.transport.close()
        elif not self._in_head:
            self._quiet_since_s = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
        if self._serving is not None and not self._serving.response_complete:
            self._serving.lost()

    def on_body(self, body: bytes) -> None:
        self._open_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._open_bytes = 0
        if not self.parser.should_upgrade():  # or another parser tells
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The parser gave up: it may have been our doing."""
        if self._too_many:
            self._refuse(ApiError(400, f"more than {MAX_WAITING} requests wait on this connection"))
        elif self._head_bytes + self._open_bytes > MAX_HEAD_BYTES:
            self._refuse(_headers_too_large())
        else:
            self._refuse(ApiError(400, "this is not a valid HTTP request"))

    # -- a client that sends no more -----------------------------------------------------------------------------

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """True keeps the way to the client open."""
        waits = self._serving is not None and not self._serving.response_complete
        whole = self.cycle is not None and not self.cycle.more_body and not self._in_head
        if not self.half_closes or self._refused or not waits or not whole or self.scope["http_version"] == "1.0":
            self.transport.close()
            return None
        self._half_closed = True
        self._look_at_client(FIRST_LOOK_S)
        return True

    def _look_at_client(self, pause_s: float) -> None:
        """Until it has its answer: is it there? The socket of one that is gone has an error once it was written to."""
        if self.transport.is_closing() or self._serving is None:
            return
        known = self.transport.get_extra_info("socket")
        if known is not None and known.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if pause_s == FIRST_LOOK_S:
            self._serving.probe()
        self.loop.call_later(pause_s, self._look_at_client, min(2 * pause_s, LONGEST_LOOK_S))

    # -- time ----------------------------------------------------------------------------------------------------

    @property
    def _look_s(self) -> float:
        return min(self.head_timeout_s, self.timeout_keep_alive)

    def _look_at_clock(self) -> None:
        serving = self._serving is not None and not self._serving.response_complete
        left_s = self._look_s
        if not serving and not self._refused:
            limit_s = self.head_timeout_s if self._in_head else self.timeout_keep_alive
            left_s = self._quiet_since_s + limit_s - self.loop.time()
        if self.transport.is_closing():
            self._cut_if_stuck(None)
        elif left_s > 0.001:
            self._timer = self.loop.call_later(min(left_s, self._look_s), self._look_at_clock)
        elif self._begun:
            message = f"the request's head did not arrive within {self.head_timeout_s:g} s"
            self._refuse(ApiError(408, message, code="head_timeout"))
        else:
            self.transport.close()
            self._cut_if_stuck(None)

    def _cut_if_stuck(self, num_before: int | None) -> None:
        """Closing waits until the client has read everything. One that does not read is not waited for."""
        num_bytes = self.transport.get_write_buffer_size()
        if num_before is not None and num_bytes >= num_before:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(self._look_s, self._cut_if_stuck, num_bytes)

    # -- inside --------------------------------------------------------------------------------------------------

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        self._open_bytes = 0
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _TooLarge

    def _refuse(self, error: ApiError) -> None:
        self._refused = True
        serving = self._serving if self._serving is not None and not self._serving.response_complete else None
        # Of an error in a body nobody but its own request is to hear.
        broken = self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body
        under_way = serving is not None and serving is self.cycle and broken
        if under_way and self.cycle.response_started:
            self.transport.close()  # anything we wrote would land in the middle of that answer
            return
        if broken and self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._last_words = head.encode() + body
        if under_way and serving is not None:
            serving.lost()  # and so the app learns that nobody waits for it
            self.flow.resume_reading()  # what still comes is thrown away
        if under_way or serving is None:
            self._say_last_words()

    def _say_last_words(self) -> None:
        self.transport.write(self._last_words)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


_FRAMING = (b"content-length", b"transfer-encoding")


def _headers_too_large() -> ApiError:
    return ApiError(431, f"the request's headers are larger than {MAX_HEAD_BYTES} bytes", code="headers_too_large")
