"""A lean HTTP/1.1 client for measuring: one parser, no queues, the clock read as the first act of every socket read.

Invariants: ``on_body`` gets the bytes with the instant they were read, taken before any parsing; a request is written
in one write; a connection carries one request at a time and goes back to the pool only after a complete answer.

Knows nothing about events, tokens or statistics. It does not follow redirects and does not decompress: both would put
the client's own work inside the times it reports.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from kvbaton.types import LocalError, RemoteError

BodySink = Callable[[bytes, float], object]
# An error page is for reading, not for measuring; more than this is cut.
MAX_ERROR_BYTES = 4096


@dataclass(slots=True)
class Response:
    """What came back, with the instants of the steps. A time is None when the step was not reached."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    connected_s: float | None = None
    sent_s: float | None = None
    headers_s: float | None = None
    closed_s: float | None = None
    error_body: bytes = b""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


class _Connection(asyncio.Protocol):
    """One socket; parses answers and hands out body bytes as they come."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._read_s = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._sink: BodySink | None = None
        self._response: Response | None = None
        self._done: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.got_bytes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class is no subclass of it

    def start(self, data: bytes, response: Response, sink: BodySink) -> asyncio.Future[None]:
        assert self.transport is not None and self._done is None, "one request at a time"
        self._parser = httptools.HttpResponseParser(self)
        self._response, self._sink = response, sink
        self.got_bytes = False
        self._done = asyncio.get_running_loop().create_future()
        response.sent_s = self._now_s()
        self.transport.write(data)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._read_s = self._now_s()
        self.got_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(RemoteError(f"the server broke HTTP: {error}", field="response"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._done is None:
            return
        self._read_s = self._now_s()
        response = self._response
        if response is not None and response.headers_s is not None and not _sized(response):
            # Neither a length nor chunks: the end of the connection is the end of the body.
            self._finish(None)
        else:
            self._finish(RemoteError(f"connection lost before the answer ended: {exc or 'closed by the server'}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is not None:
            self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._response is not None:
            self._response.status = self._parser.get_status_code()
            self._response.headers_s = self._read_s

    def on_body(self, body: bytes) -> None:
        response = self._response
        if response is None:
            return
        if response.ok and self._sink is not None:
            self._sink(body, self._read_s)
        elif len(response.error_body) < MAX_ERROR_BYTES:
            response.error_body += body[: MAX_ERROR_BYTES - len(response.error_body)]

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.closed = True
        self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        done, self._done = self._done, None
        if self._response is not None:
            self._response.closed_s = self._read_s
        self._response = self._sink = None
        if done is not None and not done.done():
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    def abort(self) -> None:
        self.closed = True
        self._response = self._sink = self._done = None
        if self.transport is not None:
            self.transport.abort()


def _sized(response: Response) -> bool:
    return "content-length" in response.headers or "chunked" in response.headers.get("transfer-encoding", "")


class HttpPool:
    """Connections to one origin. ``headers`` go with every request (authorization, for instance)."""

    def __init__(
        self,
        url: str,
        now_s: Callable[[], float],
        headers: Mapping[str, str] | None = None,
        connect_timeout_s: float = 10,
    ) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LocalError(f"not an HTTP address: {url!r}", field="url", fix="give it as http://host:port")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self.base_path = parts.path.rstrip("/")
        self._now_s = now_s
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_Connection] = []
        fields = {"host": parts.netloc.rpartition("@")[2], "user-agent": "kvbaton-bench", **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        if "\r\n" in "".join(fields.values()) or "\n" in "".join(fields.values()):
            raise LocalError("a header value holds a line end", field="header")

    def encode(self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        """The whole request as bytes, so that it can be built before its instant comes."""
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        typed = "content-type: application/json\r\n" if body else ""
        head = (
            f"{method} {self.base_path}{path} HTTP/1.1\r\n{self._head}{extra}{typed}content-length: {len(body)}\r\n\r\n"
        )
        return head.encode("latin-1") + body

    async def send(self, data: bytes, response: Response, sink: BodySink, deadline_s: float) -> None:
        """Sends encoded bytes and feeds the answer's body to ``sink``; RemoteError when no whole answer came."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._send(data, response, sink)
        except TimeoutError:
            raise RemoteError(f"no complete answer within {deadline_s:g} s", field="timeout") from None

    async def _send(self, data: bytes, response: Response, sink: BodySink) -> None:
        reused = self._take_idle()
        if reused is not None:
            try:
                await self._exchange(reused, data, response, sink)
                return
            except RemoteError:
                # The server may close an idle connection at the very moment we write: nothing was read, so a second
                # try on a fresh one is the same request, not a repeat.
                if reused.got_bytes:
                    raise
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._now_s), self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            raise RemoteError(
                f"cannot connect to {self._host}:{self._port}: {error or 'timed out'}", field="url"
            ) from error
        await self._exchange(connection, data, response, sink)

    async def _exchange(self, connection: _Connection, data: bytes, response: Response, sink: BodySink) -> None:
        response.connected_s = self._now_s()
        try:
            await connection.start(data, response, sink)
        except BaseException:
            connection.abort()
            raise
        if connection.closed:
            connection.abort()
        else:
            self._idle.append(connection)

    async def get(self, path: str, deadline_s: float = 10) -> tuple[int, bytes]:
        """Status and body of a GET, for metrics and model lists; not for measuring."""
        parts: list[bytes] = []
        response = Response()
        await self.send(self.encode("GET", path, b""), response, lambda body, _: parts.append(body), deadline_s)
        return response.status, b"".join(parts) or response.error_body

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
