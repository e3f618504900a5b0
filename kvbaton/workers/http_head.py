"""A connection: how much a request may say before its body, and what is answered when there is no request to answer.

uvicorn's parser keeps headers of any size. Here the request line and the headers together are bounded (431), whether
they come at once, in many lines or in one line without end; and what is not HTTP gets a 400 in the shape of every
other error. After such an answer the connection is closed, but only when the client has stopped sending or some
time has passed: closing under its bytes would reset the connection, and the answer with it.

Each request becomes a ``Cycle``. Knows nothing about paths, bodies or models.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvbaton.workers.http_cycle import SCOPE_KEY, Cycle
from kvbaton.workers.openai_errors import ApiError

MAX_HEAD_BYTES = 32 * 1024
LINGER_S = 1.0


class _TooLarge(Exception):
    """Ends the parser's work in the middle of a head."""


class BoundedHeadProtocol(HttpToolsProtocol):
    """uvicorn's connection with a bound on each request's head."""

    _head_bytes = 0  # of the lines of this request that are complete
    _open_bytes = 0  # received since the parser last made something of them
    _refused = False
    _serving: Cycle | None = None  # ``cycle`` is the last one that was parsed, which may have to wait for it

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._open_bytes += len(data)
        super().data_received(data)
        if not self._refused and self._too_large:
            self._refuse(_headers_too_large())

    def on_message_begin(self) -> None:
        self._open_bytes = self._head_bytes = 0
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)  # a colon, a space and the end of the line
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._open_bytes = self._head_bytes = 0  # what is counted from here on are trailers
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
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:  # one at a time, in order
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._serving = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._serving is not None and not self._serving.response_complete:
            self._serving.lost()

    def on_body(self, body: bytes) -> None:
        self._open_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._open_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this when the parser gave up: it may have been our doing."""
        self._refuse(_headers_too_large() if self._too_large else ApiError(400, "this is not a valid HTTP request"))

    def eof_received(self) -> None:
        if self._refused:
            self.transport.close()

    @property
    def _too_large(self) -> bool:
        return self._head_bytes + self._open_bytes > MAX_HEAD_BYTES

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        self._open_bytes = 0
        if self._too_large:
            raise _TooLarge

    def _refuse(self, error: ApiError) -> None:
        self._refused = True
        under_way = self.cycle is not None and not self.cycle.response_complete
        if under_way and self.cycle.response_started:
            self.transport.close()  # anything we wrote would land in the middle of that answer
            return
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if under_way:
            self.transport.close()  # and so the app learns that nobody waits for it
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def _headers_too_large() -> ApiError:
    return ApiError(431, f"the request's headers are larger than {MAX_HEAD_BYTES} bytes", code="headers_too_large")
