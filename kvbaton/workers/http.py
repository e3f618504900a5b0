"""The HTTP shell that worker and router share: bounded bodies, answers, streams, disconnects, and the server itself.

Raw ASGI, because a splice of bytes needs nothing more. Invariants: a body never takes more memory than its limit, nor
longer than its deadline; when the client goes away the work for it is cancelled and has ended before the handler
returns. Knows nothing about models or OpenAI beyond the shape of an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping
from typing import Any, TypeVar

import uvicorn

from kvbaton.types import LocalError
from kvbaton.workers.http_cycle import SCOPE_KEY, Cycle
from kvbaton.workers.http_head import BoundedHeadProtocol
from kvbaton.workers.openai_errors import ApiError, bad_request, unavailable

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
T = TypeVar("T")
TOO_MANY_BYTES = "too_many_bytes"
WATCHES = 16  # connections that are accepted each time round
LINGER_S = 1.0
LINGER_BYTES = 64 * 1024 * 1024

JSON_HEADER = (b"content-type", b"application/json")
SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx holds the stream back
]


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class BodyBudget:
    """Bytes of request bodies in memory at once, over all requests: many large ones must not add up."""

    def __init__(self, max_bytes: int) -> None:
        self.left_bytes = max_bytes

    @contextlib.contextmanager
    def claim(self) -> Iterator[Claim]:
        """One request's share, given back when the request is over."""
        claim = Claim(self)
        try:
            yield claim
        finally:
            self.left_bytes += claim.num_bytes


class Claim:
    def __init__(self, budget: BodyBudget) -> None:
        self.num_bytes = 0
        self._budget = budget

    def take(self, num_bytes: int) -> None:
        if num_bytes > self._budget.left_bytes:
            raise unavailable("too many large requests at once", TOO_MANY_BYTES)
        self._budget.left_bytes -= num_bytes
        self.num_bytes += num_bytes


class Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.started = False
        self._receive = receive
        self._send = send
        self._cycle: Cycle | None = scope.get(SCOPE_KEY)  # None: some other server, which speaks plain ASGI

    async def read_body(self, max_bytes: int, timeout_s: float, claim: Claim | None = None) -> bytes:
        """The whole body. 413, 415, 408, 503 when ``claim`` finds nothing left, or ClientGone."""
        if self.headers.get(b"content-encoding", b"identity") != b"identity":
            raise ApiError(415, "compressed bodies are not accepted", param="content-encoding")
        too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
        declared = self.headers.get(b"content-length")
        if declared is not None and (len(declared) > 18 or int(declared) > max_bytes):
            raise too_large
        if self._cycle is not None and (whole := self._cycle.take_body()) is not None:
            if len(whole) > max_bytes:
                raise too_large
            if claim is not None:
                claim.take(len(whole))
            return whole
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    num_bytes += len(part)
                    if num_bytes > max_bytes:
                        raise too_large
                    if claim is not None:
                        claim.take(len(part))
                    parts.append(part)
                    if not message.get("more_body", False):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", code="body_timeout") from None

    async def until_disconnect(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``; cancel it and raise ClientGone if the client goes away first. The body must have been read."""
        me = asyncio.current_task()
        assert me is not None
        before, gone = me.cancelling(), False

        def leave() -> None:
            nonlocal gone
            gone = True
            me.cancel()

        async def watch() -> None:
            await self._disconnected()
            leave()

        watcher: asyncio.Future[None] | None = None
        if self._cycle is None:
            watcher = asyncio.ensure_future(watch())
        elif self._cycle.disconnected:
            work.close()
            raise ClientGone
        else:
            self._cycle.flow.resume_reading()  # or nobody would notice
            self._cycle.on_gone = leave
        try:
            return await work
        except asyncio.CancelledError:
            if gone and me.uncancel() <= before:  # it was ours, and nobody else wants us to end
                raise ClientGone from None
            raise
        finally:
            if watcher is not None:
                watcher.cancel()
            elif self._cycle is not None:
                self._cycle.on_gone = None

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Headers) -> None:
        """The head may leave only with what follows it."""
        self.started = True
        if self._cycle is not None:
            self._cycle.begin(status, headers)
            return
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, part: bytes) -> None:
        if self._cycle is not None:
            await self._cycle.put(part, True)
            return
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self, part: bytes = b"") -> None:
        if self._cycle is not None:
            await self._cycle.put(part, False)
            return
        await self._send({"type": "http.response.body", "body": part, "more_body": False})

    async def answer(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [JSON_HEADER, length, *(headers or [])])
        await self.end(b"" if self.method == "HEAD" else body)

    async def answer_text(self, body: bytes, content_type: bytes) -> None:
        await self.start(200, [(b"content-type", content_type), (b"content-length", b"%d" % len(body))])
        await self.end(b"" if self.method == "HEAD" else body)

    async def fail(self, error: ApiError, headers: Headers | None = None) -> None:
        """Answer with ``error``. A body that was not read makes the connection useless: it is closed afterwards."""
        body = error.body()
        if error.status not in (408, 413, 415) and error.code != TOO_MANY_BYTES:
            await self.answer(error.status, body, [*error.headers(), *(headers or [])])
            return
        length = (b"content-length", str(len(body)).encode())
        close = (b"connection", b"close")
        await self.start(error.status, [JSON_HEADER, length, close, *error.headers(), *(headers or [])])
        await self.write(body)
        await self._linger()
        await self.end()

    async def _linger(self) -> None:
        """Discard some of what still comes: closing at once would reset the connection under the answer."""
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while num_bytes < LINGER_BYTES:
                    message = await self._receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


class _Deadline:
    """A timeout that is listed while it runs. A class: a generator would cost each request more."""

    def __init__(self, timeout_s: float, listed: set[asyncio.Timeout]) -> None:
        self._timeout = asyncio.timeout(timeout_s)
        self._listed = listed

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._listed.add(self._timeout)

    async def __aexit__(self, *raised: Any) -> None:
        self._listed.discard(self._timeout)
        await self._timeout.__aexit__(*raised)  # it raises or does nothing


class OpenRequests:
    """Counts requests in flight and can end them all: what a drain waits for, and what it does at its deadline."""

    def __init__(self) -> None:
        self.num = 0
        self.cut = False  # the drain deadline passed; open requests are being ended
        self._idle = asyncio.Event()
        self._idle.set()
        self._timeouts: set[asyncio.Timeout] = set()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        self.num += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num -= 1
            if self.num == 0:
                self._idle.set()

    def deadline(self, timeout_s: float) -> _Deadline:
        """As ``asyncio.timeout``, and ended by a cut too."""
        return _Deadline(timeout_s, self._timeouts)

    async def idle(self, deadline_s: float) -> bool:
        """Wait until none is open. False when some were at the deadline; they go on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        return self.num == 0

    async def drained(self, deadline_s: float, grace_s: float = 5.0) -> bool:
        """Wait until none is open; at the deadline let each end with an error. True when none had to be cut."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
            return True
        except TimeoutError:
            self.cut = True
        now_s = asyncio.get_running_loop().time()
        for timeout in self._timeouts:
            timeout.reschedule(now_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        return False


def method_not_allowed(allowed: str) -> ApiError:
    methods = "GET, HEAD" if allowed == "GET" else allowed
    return ApiError(405, f"use {allowed}", code="method_not_allowed", allow=methods)


def not_found(path: str) -> ApiError:
    return ApiError(404, f"there is nothing at {path[:100]!r}", code="not_found")


def clean_request_id(value: bytes | None) -> str | None:
    """A client's X-Request-Id to echo; it is never used as a key. 400 when it is not something to echo."""
    if value is None:
        return None
    if len(value) > 128 or not value.isascii() or not all(33 <= byte <= 126 and byte != 34 for byte in value):
        raise bad_request("X-Request-Id must be at most 128 visible ASCII characters without quotes", "x-request-id")
    return value.decode("ascii")


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; ``port`` 0 takes any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. asyncio sets it only where the protocol was named at creation; without it, the part of
        # an answer that follows its head waits up to 40 ms for the peer to acknowledge the head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        ours = error.errno not in (errno.EADDRINUSE, errno.EACCES)
        fix = "--host must be an address of this machine" if ours else "give another --port, or 0 for any free one"
        message = f"cannot listen on {host}:{port}: {error.strerror}"
        raise LocalError(message, field="host" if ours else "port", fix=fix) from error
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process that runs it decides when to end."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHeadProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """uvloop accepts one connection of a socket each time round, however many wait; under load a round is long,
        and new clients would wait behind many rounds of old ones. So each socket is watched several times over."""
        watched = [one for each in sockets or [] for one in (each, *(each.dup() for _ in range(WATCHES - 1)))]
        await super().serve(watched or None)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Stop accepting, let open answers finish for some seconds, then return from ``serve``."""
        self.should_exit = True
