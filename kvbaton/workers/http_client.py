"""The router's calls to workers: POST over kept connections, answers as they arrive, no more work per byte than needed.

Speaks as much of aiohttp's client interface as the router uses, and raises its exceptions, so that callers have one set
of them; written by us because a call through aiohttp costs several times what everything else the router does for it
costs (docs/dependencies.md). Invariants: a connection carries one call at a time and is kept only after a complete
answer; leaving a call early closes its connection, which tells the worker; a call that gets no byte for the stall
timeout ends with an error; of an answer that is not taken at most ``HIGH_WATER_BYTES`` and one read are held; a kept
connection that the worker closed before it said a byte of the answer costs nothing: the call is made once more, on a
new one. Most likely it was closing when the call came; had the worker begun, it ends its work for a lost connection.
Idle connections are closed and forgotten by a clock and not by the next call, so that nothing is left of a burst, nor
of workers that are gone.
Knows nothing about events, workers or retries; it follows no redirect, decompresses nothing and speaks no TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import aiohttp
import httptools
from aiohttp.client_reqrep import ConnectionKey

HIGH_WATER_BYTES = 256 * 1024
MAX_ANSWER_BYTES = 256 * 1024 * 1024  # of an answer read whole
# Workers keep idle connections for 75 s: ours are dropped earlier, so that none is reused while it closes.
KEEP_ALIVE_S = 30.0
MAX_IDLE = 1024  # kept for each worker
MAX_HEADS = 1024  # addresses whose heads are kept


class _Unasked(Exception):
    """Ends the parser's work where another answer begins."""


class _Connection(asyncio.Protocol):
    """One socket to one worker, and the answer that is arriving on it."""

    def __init__(self, stall_timeout_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.idle_since_s = 0.0
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = True  # no answer is expected, or all of it is here
        self.parts: list[bytes] = []
        self._num_bytes = 0  # of ``parts``
        self._head_done = False
        self._silent = True  # not a byte of the answer came
        self._paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], bool] | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._stall_timeout_s = stall_timeout_s
        self._heard_s = 0.0
        # One for the connection's whole life, moved when it rings, not at every byte nor call.
        self._timer: asyncio.TimerHandle | None = None

    # -- called by the event loop and by the parser --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class is no subclass of it

    def data_received(self, data: bytes) -> None:
        if self.complete:  # nobody asked: whatever this is, the connection is of no use any more
            self.abort()
            return
        self._heard_s = self.loop.time()
        self._silent = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(aiohttp.ClientPayloadError(f"the worker broke HTTP: {error}"))
        if (
            self._sink is not None
            and self.parts
            and self._waiter is not None
            and not self._waiter.done()  # whoever takes the parts waits, so all of them came just now
            and self._sink(self.parts[0] if len(self.parts) == 1 else b"".join(self.parts))
        ):
            self.parts, self._num_bytes = [], 0
            if not self.complete and self._error is None:
                return
        if self._num_bytes > HIGH_WATER_BYTES and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.complete and self._error is None:
            if self._head_done:
                self._error = aiohttp.ClientPayloadError("the connection was lost before the answer ended")
            else:
                self._error = aiohttp.ServerDisconnectedError()
            self._wake()

    def on_message_begin(self) -> None:
        if self.complete:  # it would be taken for more of the answer that is
            self.closed = True
            raise _Unasked

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._head_done = self.status >= 200  # what comes before is only informational
        if not self._head_done:
            self.headers = []

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)
        self._num_bytes += len(body)

    def on_message_complete(self) -> None:
        if not self._head_done:
            return
        self.complete = True
        if not self._parser.should_keep_alive():
            self.closed = True

    # -- called by the call --------------------------------------------------------------------------------------

    def send(self, head: bytes, body: bytes) -> None:
        assert self.transport is not None and self.complete, "one call at a time"
        self.complete, self._head_done, self._silent, self._error = False, False, True, None
        self.headers = []
        self._heard_s = self.loop.time()
        if self._timer is None:
            self._timer = self.loop.call_later(self._stall_timeout_s, self._look_at_clock)
        if len(body) < 65536:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    async def head(self) -> None:
        while not self._head_done:
            await self._more()

    async def take(self) -> bytes:
        """What has arrived; waits for something. Nothing only at the end of the answer."""
        while not self.parts:
            if self.complete:
                return b""
            if self._error is not None:
                raise self._error
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        parts, self.parts, self._num_bytes = self.parts, [], 0
        if self._paused and self.transport is not None:
            self._paused = False
            self.transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def died_silent(self) -> bool:
        """It was lost before the worker had said a byte of the answer."""
        return self._silent and not self.complete

    def end(self) -> None:
        """The call is over, well or not."""
        self._sink = None
        if not self.complete or self.closed or self.parts or self._error is not None:
            self.abort()
        self.idle_since_s = self.loop.time()

    def passes_to(self, sink: Callable[[bytes], bool]) -> None:
        """While somebody waits for a part, offer it there first: it is taken, and nobody woken, or False."""
        self._sink = sink

    def abort(self) -> None:
        self.closed = True
        self.parts = []
        if self.transport is not None:
            self.transport.abort()

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self.complete and self._error is None:
            self._error = error
            self._wake()

    def _look_at_clock(self) -> None:
        if self.complete or self._error is not None:  # nothing is expected: the next call begins again
            self._timer = None
            return
        # While reading is paused it is we who do not listen.
        left_s = self._stall_timeout_s if self._paused else self._heard_s + self._stall_timeout_s - self.loop.time()
        if left_s <= 0.001:
            self._timer = None
            self._fail(aiohttp.SocketTimeoutError("no byte arrived within the stall timeout"))
        else:
            self._timer = self.loop.call_later(left_s, self._look_at_clock)


class Content:
    """The body of an answer, once, in order."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    def iter_any(self) -> Content:
        return self

    def __aiter__(self) -> Content:
        return self

    async def __anext__(self) -> bytes:
        part = await self._connection.take()
        if not part:
            raise StopAsyncIteration
        return part

    async def read(self, max_bytes: int) -> bytes:
        """At most ``max_bytes`` of it; what is more is left where it is."""
        parts, num_bytes = [], 0
        while num_bytes < max_bytes and (part := await self._connection.take()):
            parts.append(part)
            num_bytes += len(part)
        return b"".join(parts)[:max_bytes]


class Response:
    def __init__(self, connection: _Connection) -> None:
        self.status = connection.status
        self.raw_headers = connection.headers
        self.content = Content(connection)
        self.take = connection.take  # the next part, as it arrived; nothing at the end
        self.passes_to = connection.passes_to

    @property
    def headers(self) -> dict[str, str]:
        """Names in lower case."""
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self.raw_headers}

    def header(self, name: bytes) -> bytes | None:
        """``name`` in lower case."""
        for known, value in self.raw_headers:
            if len(known) == len(name) and known.lower() == name:
                return value
        return None

    async def read(self) -> bytes:
        body = await self.content.read(MAX_ANSWER_BYTES + 1)
        if len(body) > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
        return body


class _Call:
    """``async with client.post(...) as response``."""

    def __init__(self, client: HttpClient, origin: str, head: bytes, body: bytes) -> None:
        self._client, self._origin, self._head, self._body = client, origin, head, body
        self._connection: _Connection | None = None

    async def __aenter__(self) -> Response:
        kept = self._client.idle(self._origin)
        if kept is not None:
            try:
                return await self._ask(kept)
            except aiohttp.ServerDisconnectedError as lost:
                if not kept.died_silent:
                    raise
                try:
                    fresh = await self._client.connect(self._origin)
                except aiohttp.ClientError:
                    raise lost from None  # it is gone, and may have gone because of this call
        else:
            fresh = await self._client.connect(self._origin)
        return await self._ask(fresh)

    async def _ask(self, connection: _Connection) -> Response:
        self._connection = connection
        try:
            connection.send(self._head, self._body)
            await connection.head()
        except BaseException:
            connection.end()
            raise
        self._head = self._body = b""
        return Response(connection)

    async def __aexit__(self, *_: object) -> None:
        assert self._connection is not None
        self._connection.end()
        self._client.keep(self._origin, self._connection)


class HttpClient:
    """Connections to any number of workers."""

    def __init__(self, connect_timeout_s: float, stall_timeout_s: float, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._keep_alive_s = keep_alive_s
        self._idle: dict[str, list[_Connection]] = {}  # by address; the one used last is the last
        self._sweeping: asyncio.TimerHandle | None = None  # while anything is idle
        self._closed = False
        # By address, what a head begins with, and the headers it was made of: usually the same ones again.
        self._heads: dict[str, tuple[Mapping[str, str], str, bytes]] = {}

    def post(self, url: str, *, data: bytes, headers: Mapping[str, str]) -> _Call:
        """``url`` is http://host:port/path; ``headers`` must come from us or have been checked."""
        known = self._heads.get(url)
        if known is None or known[0] is not headers:
            cut = url.index("/", 7)
            origin, path = url[7:cut], url[cut:]
            lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
            head = f"POST {path} HTTP/1.1\r\nhost: {origin}\r\n{lines}content-length: "
            known = headers, origin, head.encode("latin-1")
            if len(self._heads) >= MAX_HEADS:
                self._heads.clear()
            self._heads[url] = known
        return _Call(self, known[1], b"%b%d\r\n\r\n" % (known[2], len(data)), data)

    def idle(self, origin: str) -> _Connection | None:
        """The one used last: the others may then be dropped."""
        kept = self._idle.get(origin)
        while kept:
            connection = kept.pop()
            if connection.closed:
                continue
            if connection.loop.time() - connection.idle_since_s > 2 * self._keep_alive_s:
                connection.abort()  # no sweep came: the process stood still
                continue
            return connection
        return None

    def keep(self, origin: str, connection: _Connection) -> None:
        if self._closed:
            connection.abort()
        if connection.closed:
            return
        kept = self._idle.setdefault(origin, [])
        if len(kept) >= MAX_IDLE:
            kept.pop(0).abort()
        kept.append(connection)
        if self._sweeping is None:
            self._sweeping = connection.loop.call_later(self._keep_alive_s, self._sweep)

    async def connect(self, origin: str) -> _Connection:
        host, _, port = origin.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._stall_timeout_s), host.strip("[]"), int(port)
                )
        except TimeoutError:
            raise aiohttp.ConnectionTimeoutError(f"no connection to {origin}") from None
        except OSError as error:
            key = ConnectionKey(host, int(port), False, True, None, None, None, None)
            raise aiohttp.ClientConnectorError(key, error) from error
        return connection

    @property
    def num_idle(self) -> int:
        return sum(map(len, self._idle.values()))

    def _sweep(self) -> None:
        """Close what was idle for long, and forget it with what the workers closed."""
        loop, self._sweeping = asyncio.get_running_loop(), None
        since_s, oldest_s = loop.time() - self._keep_alive_s, loop.time()
        for origin, kept in list(self._idle.items()):
            fresh = [each for each in kept if not each.closed and each.idle_since_s > since_s]
            for each in kept:
                if each.idle_since_s <= since_s:
                    each.abort()
            if fresh:
                kept[:] = fresh
                oldest_s = min(oldest_s, fresh[0].idle_since_s)
            else:
                del self._idle[origin]
        if self._idle:
            # Not for each of a burst by itself: every sweep looks at all of them.
            in_s = max(oldest_s + self._keep_alive_s - loop.time(), self._keep_alive_s / 8)
            self._sweeping = loop.call_later(in_s, self._sweep)

    def close(self) -> None:
        """For good: what calls are still open closes when they end."""
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for kept in self._idle.values():
            for connection in kept:
                connection.abort()
        self._idle.clear()

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # let the loop close the sockets
