"""The HTTP shell that worker and router share: bounded bodies, answers, streams, disconnects, and the server itself.

Raw ASGI, because a splice of bytes needs nothing more. Invariants: a body never takes more memory than its limit, nor
longer than its deadline; when the client goes away the work for it is cancelled and has ended before the handler
returns. Knows nothing about models or OpenAI beyond the shape of an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping, Sequence
from typing import Any, Self, TypeVar

import uvicorn

from kvbaton.types import LocalError
from kvbaton.workers.http_cycle import SCOPE_KEY, Cycle
from kvbaton.workers.http_head import HEAD_TIMEOUT_S, BoundedHeadProtocol
from kvbaton.workers.openai_errors import ApiError, bad_request, unavailable

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
T = TypeVar("T")
TOO_MANY_BYTES = "too_many_bytes"
WATCHES = 16  # connections that are accepted each time round
FREE_BYTES = 64 * 1024  # of each body
LONG_S, LOOK_S = 60.0, 0.5  # a deadline from which on it may come so much later
PATIENCE_S = 2.0  # an upload that takes longer gives way when others want its room
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
    """Bytes of large request bodies in memory at once, over all requests: many of them must not add up.

    What a body has up to ``FREE_BYTES`` is not counted (the number of requests at once bounds that), so that a few
    large ones never keep out small ones. When nothing is left, the upload that has been arriving for longest gives way
    to the next, so that nobody keeps others out by sending slowly.
    """

    def __init__(self, max_bytes: int) -> None:
        self.left_bytes = max_bytes
        self._arriving: dict[Claim, Callable[[], None]] = {}  # and what ends them; the oldest first

    def make_room(self, num_bytes: int, other_than: Claim, now_s: float) -> bool:
        """End uploads until there is room. False when there is none to be had."""
        for claim, end in list(self._arriving.items()):
            if self.left_bytes >= num_bytes:
                break
            if claim is not other_than and claim.num_bytes and now_s - claim.since_s > PATIENCE_S:
                claim.release()
                end()
        return self.left_bytes >= num_bytes


class Claim:
    """One request's share, given back when the request is over."""

    __slots__ = ("_budget", "_num_free_bytes", "num_bytes", "since_s")

    def __init__(self, budget: BodyBudget) -> None:
        self.num_bytes = 0
        self.since_s = 0.0  # when its upload began
        self._num_free_bytes = FREE_BYTES
        self._budget = budget

    def take(self, num_bytes: int, now_s: float) -> None:
        if num_bytes <= self._num_free_bytes:
            self._num_free_bytes -= num_bytes
            return
        num_bytes -= self._num_free_bytes
        self._num_free_bytes = 0
        budget = self._budget
        if num_bytes > budget.left_bytes and not budget.make_room(num_bytes, self, now_s):
            raise unavailable("too many large requests at once", TOO_MANY_BYTES)
        budget.left_bytes -= num_bytes
        self.num_bytes += num_bytes

    def arriving(self, now_s: float, end: Callable[[], None]) -> None:
        """Its upload goes on; ``end`` breaks it off."""
        self.since_s = now_s
        self._budget._arriving[self] = end

    def arrived(self) -> None:
        self._budget._arriving.pop(self, None)

    def release(self) -> None:
        self.arrived()
        self._budget.left_bytes += self.num_bytes
        self.num_bytes = 0


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
        # Taken out, or the two would be a cycle. None: some other server, which speaks plain ASGI.
        self._cycle: Cycle | None = scope.pop(SCOPE_KEY, None)
        self._watcher: asyncio.Future[None] | None = None  # there

    async def read_body(self, max_bytes: int, timeout_s: float, claim: Claim | None = None) -> bytes:
        """The whole body. 413, 415, 408, 503 when ``claim`` finds nothing left, or ClientGone."""
        if self.headers.get(b"content-encoding", b"identity") != b"identity":
            raise ApiError(415, "compressed bodies are not accepted", param="content-encoding")
        declared = self.headers.get(b"content-length")
        if declared is not None and (len(declared) > 18 or int(declared) > max_bytes):
            raise _too_large(max_bytes)
        loop = asyncio.get_running_loop()
        if self._cycle is not None and (whole := self._cycle.take_body()) is not None:
            if len(whole) > max_bytes:
                raise _too_large(max_bytes)
            if claim is not None:
                claim.take(len(whole), loop.time())
            return whole
        began_s = loop.time()
        timeout = asyncio.timeout(timeout_s)
        if claim is not None:
            # One that is over already, but has not heard of it yet, cannot be ended again.
            claim.arriving(began_s, lambda: None if timeout.expired() else timeout.reschedule(loop.time()))
        try:
            async with timeout:
                return await self._body_in_parts(max_bytes, claim, loop)
        except TimeoutError:
            late = loop.time() - began_s >= timeout_s
            message = f"within {timeout_s:g} s" if late else "soon enough for others to wait for it"
            raise ApiError(408, f"the body did not arrive {message}", code="body_timeout") from None
        finally:
            if claim is not None:
                claim.arrived()

    async def _body_in_parts(self, max_bytes: int, claim: Claim | None, loop: asyncio.AbstractEventLoop) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            if claim is not None:
                claim.take(len(part), loop.time())
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def until_disconnect(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``; cancel it and raise ClientGone if the client goes away first. The body must have been read."""
        try:
            with Bound(None) as bound:
                bound.watch(self)
                return await work
        finally:
            work.close()  # if it never began

    def on_gone(self, call: Callable[[], None] | None) -> None:
        """Whom to tell when the client goes before its answer is complete; None: nobody any more."""
        if self._cycle is not None:
            if call is not None:
                if self._cycle.disconnected:
                    raise ClientGone
                self._cycle.flow.resume_reading()  # or nobody would notice
            self._cycle.on_gone = call
        elif self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        elif call is not None:
            self._watcher = asyncio.ensure_future(self._watch(call))

    async def _watch(self, call: Callable[[], None]) -> None:
        await self._disconnected()
        call()

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

    async def end_soon(self, part: bytes) -> None:
        """``end``, where nothing else bounds the wait: a client that does not read is left alone."""
        try:
            async with asyncio.timeout(LINGER_S):
                await self.end(part)
        except TimeoutError:
            if self._cycle is not None:
                self._cycle.transport.abort()

    async def answer(self, status: int, body: bytes, headers: Headers = ()) -> None:
        await self.start(status, [JSON_HEADER, (b"content-length", b"%d" % len(body)), *headers])
        body = b"" if self.method == "HEAD" else body
        if not self.put_now(body, False):
            await self.end_soon(body)

    @property
    def may_put_now(self) -> bool:
        """Whether ``put_now`` would write."""
        return self._cycle is not None and not self._cycle.flow.write_paused

    def put_now(self, part: bytes, more: bool) -> bool:
        """``write`` or ``end`` without waiting. False, and nothing happened, where it would have to wait."""
        return self._cycle is not None and self._cycle.put_now(part, more)

    async def answer_text(self, body: bytes, content_type: bytes) -> None:
        await self.start(200, [(b"content-type", content_type), (b"content-length", b"%d" % len(body))])
        await self.end_soon(b"" if self.method == "HEAD" else body)

    async def fail(self, error: ApiError, headers: Headers = ()) -> None:
        """Answer with ``error``. A body that was not read makes the connection useless: it is closed afterwards."""
        body = error.body()
        if error.status not in (408, 413, 415) and error.code != TOO_MANY_BYTES:
            await self.answer(error.status, body, [*error.headers(), *headers])
            return
        length = (b"content-length", b"%d" % len(body))
        close = (b"connection", b"close")
        await self.start(error.status, [JSON_HEADER, length, close, *error.headers(), *headers])
        if self._cycle is not None and not self.may_put_now:
            await self.end_soon(body)
            return
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


class Bound:
    """What may end a request from outside: its deadline, a cut of all of them, the client that goes.

    ``with bound:`` around the work. A deadline or cut becomes TimeoutError there; the client's going, if it is watched,
    ClientGone. A class of its own: ``asyncio.timeout`` and a task that watches would cost each request more.
    """

    __slots__ = ("_before", "_exchange", "_gone", "_listed", "_over", "_task", "_timeout_s", "_timer", "due_s")

    def __init__(self, timeout_s: float | None, listed: OpenRequests | None = None) -> None:
        """``timeout_s``: None for none; ``listed``: where it is found by those who cut all of them."""
        self._timeout_s = timeout_s
        self._listed = listed
        self.due_s = math.inf  # for who looks at the clock now and then
        self._timer: asyncio.TimerHandle | None = None
        self._over = self._gone = False
        self._exchange: Exchange | None = None

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a bound is a task's"
        self._task = task
        self._before = task.cancelling()
        if self._listed is not None and self._listed.take(self, self._timeout_s):
            return self
        if self._timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self.cut)
        return self

    def watch(self, exchange: Exchange) -> None:
        """From now on the client's going ends the work. The body must have been read. ClientGone if it went already."""
        self._exchange = exchange
        exchange.on_gone(self._leave)

    def cut(self) -> None:
        """The time is up. It may be said twice: by the clock, and to all."""
        if not self._over:
            self._over = True
            self._task.cancel()

    def _leave(self) -> None:
        self._gone = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._listed is not None:
            self._listed.drop(self)
        if self._exchange is not None:
            self._exchange.on_gone(None)
        if self._over or self._gone:
            left = self._task.cancelling()
            for _ in range(self._over + self._gone):
                left = self._task.uncancel()
            if left <= self._before and kind is asyncio.CancelledError:  # ours, and nobody else wants us to end
                raise (ClientGone if self._gone else TimeoutError) from None


class OpenRequests:
    """Counts requests in flight and can end them all: what a drain waits for, and what it does at its deadline."""

    def __init__(self) -> None:
        self.num = 0
        self.cut = False  # the drain deadline passed; open requests are being ended
        self._idle = asyncio.Event()
        self._idle.set()
        self._bounds: set[Bound] = set()
        self._timer: asyncio.TimerHandle | None = None

    def enter(self) -> None:
        """One more. ``leave`` must follow."""
        self.num += 1
        if self.num == 1:
            self._idle.clear()

    def leave(self) -> None:
        self.num -= 1
        if self.num == 0:
            self._idle.set()

    def bound(self, timeout_s: float) -> Bound:
        """``with open.bound(...):`` ended by its deadline, and by a cut."""
        return Bound(timeout_s, self)

    def take(self, bound: Bound, timeout_s: float | None) -> bool:
        """List it. True when its deadline is looked after from here: a long one, for which some time more is nothing,
        and a timer of each request's own would be something."""
        self._bounds.add(bound)
        if timeout_s is None or timeout_s < LONG_S:
            return False
        loop = asyncio.get_running_loop()
        bound.due_s = loop.time() + timeout_s
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look, loop)
        return True

    def drop(self, bound: Bound) -> None:
        self._bounds.discard(bound)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        for bound in [each for each in self._bounds if each.due_s <= now_s]:
            bound.cut()
        self._timer = loop.call_later(LOOK_S, self._look, loop) if self._bounds else None

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
        for bound in list(self._bounds):
            bound.cut()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        return False


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")


def method_not_allowed(allowed: str) -> ApiError:
    methods = "GET, HEAD" if allowed == "GET" else allowed
    return ApiError(405, f"use {allowed}", code="method_not_allowed", allow=methods)


def not_found(path: str) -> ApiError:
    return ApiError(404, f"there is nothing at {path[:100]!r}", code="not_found")


def clean_request_id(value: bytes | None) -> str | None:
    """A client's X-Request-Id to echo; it is never used as a key. 400 when it is not something to echo."""
    if value is None:
        return None
    if not is_header_word(value):
        raise bad_request("X-Request-Id must be at most 128 visible ASCII characters without quotes", "x-request-id")
    return value.decode("ascii")


def is_header_word(value: bytes) -> bool:
    """Whether it may be written into a header as it stands."""
    return len(value) <= 128 and all(33 <= byte <= 126 and byte != 34 for byte in value)


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

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        head_timeout_s: float = HEAD_TIMEOUT_S,
        half_closes: bool = False,
    ) -> None:
        class Protocol(BoundedHeadProtocol):
            pass

        Protocol.head_timeout_s, Protocol.half_closes = head_timeout_s, half_closes
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
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
