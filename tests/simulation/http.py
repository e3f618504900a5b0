"""HTTP without sockets: an ASGI app at one end of a wire, the router's two clients at the other.

``Caller`` speaks as much of ``HttpClient`` and of aiohttp's session as the router uses, and fails the way those do:
refused, no connection in time, connection lost, no byte in time. Knows nothing about what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_reqrep import ConnectionKey

if TYPE_CHECKING:
    from .world import World


class Serving:
    """One request to an app, at the end of a wire where the app's process is."""

    def __init__(self, app: Any, end: Any) -> None:
        self._app, self._end = app, end
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        end.on_item = self._request
        end.on_closed = lambda: self._incoming.put_nowait({"type": "http.disconnect"})

    def _request(self, item: tuple[dict[str, Any], bytes]) -> None:
        scope, body = item
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self._end.process.spawn(self._run(scope))

    async def _run(self, scope: dict[str, Any]) -> None:
        try:
            await self._app(scope, self._incoming.get, self._send)
        finally:
            self._end.close()

    async def _send(self, message: dict[str, Any]) -> None:
        self._end.send(message)


class Answer:
    """What a caller sees of one call."""

    def __init__(self, stall_s: float) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.content = self
        self._stall_s = stall_s
        self._arrived: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = False

    @property
    def content_length(self) -> int | None:
        found = self.headers.get("content-length")
        return int(found) if found is not None else None

    def on_item(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            if not self._head.done():
                self._head.set_result(None)
            return
        if message.get("body"):
            self._arrived.put_nowait(message["body"])
        if not message.get("more_body", False):
            self._over = True
            self._arrived.put_nowait(None)

    def on_closed(self) -> None:
        if self._over:
            return
        if not self._head.done():
            self._head.set_exception(aiohttp.ServerDisconnectedError())
        else:
            self._arrived.put_nowait(aiohttp.ClientPayloadError("the connection was lost before the answer ended"))

    async def head(self) -> None:
        await self._in_time(asyncio.shield(self._head))

    async def _in_time(self, wait: Any) -> Any:
        try:
            async with asyncio.timeout(self._stall_s):
                return await wait
        except TimeoutError:
            raise aiohttp.SocketTimeoutError("no byte arrived within the stall timeout") from None

    def iter_any(self) -> Answer:
        return self

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> bytes:
        part = await self._in_time(self._arrived.get())
        if part is None:
            self._arrived.put_nowait(None)  # asked again, it is still the end
            raise StopAsyncIteration
        if isinstance(part, Exception):
            raise part
        return part

    async def take(self) -> bytes:
        async for part in self:
            return part
        return b""

    def passes_to(self, sink: Any) -> None:
        """Nothing passes by the task here: a wire has no client's socket to write to."""

    def header(self, name: bytes) -> bytes | None:
        found = self.headers.get(name.decode())
        return found.encode() if found is not None else None

    async def read(self, max_bytes: int = 1 << 30) -> bytes:
        parts = [part async for part in self]
        return b"".join(parts)[:max_bytes]


class Call:
    def __init__(self, caller: Caller, method: str, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        self._caller, self._method, self._url, self._body, self._headers = caller, method, url, body, headers
        self._end: Any = None

    async def __aenter__(self) -> Answer:
        caller, parts = self._caller, urlsplit(self._url)
        world = caller.world
        try:
            target = world.process_at(parts.hostname or "")
            wire = await world.network.connect(caller.process, target, caller.connect_timeout_s)
        except TimeoutError:
            raise aiohttp.ConnectionTimeoutError(f"no connection to {parts.netloc}") from None
        except OSError as error:
            key = ConnectionKey(parts.hostname or "", parts.port or 0, False, True, None, None, None, None)
            raise aiohttp.ClientConnectorError(key, error) from error
        self._end = wire.ends[0]
        answer = Answer(caller.stall_timeout_s)
        self._end.on_item, self._end.on_closed = answer.on_item, answer.on_closed
        Serving(target.server, wire.ends[1])
        self._end.send((self._scope(parts), self._body))
        try:
            await answer.head()
        except BaseException:
            self._end.close()
            raise
        return answer

    def _scope(self, parts: Any) -> dict[str, Any]:
        headers = [(name.lower().encode(), value.encode()) for name, value in self._headers.items()]
        return {
            "type": "http", "method": self._method, "path": parts.path, "query_string": parts.query.encode(),
            "headers": [*headers, (b"content-length", b"%d" % len(self._body))],
        }  # fmt: skip

    async def __aexit__(self, *_: object) -> None:
        self._end.close()


class Caller:
    """``HttpClient`` and ``aiohttp.ClientSession`` of one router process."""

    def __init__(self, world: World, process: Any, connect_timeout_s: float, stall_timeout_s: float) -> None:
        self.world, self.process = world, process
        self.connect_timeout_s, self.stall_timeout_s = connect_timeout_s, stall_timeout_s

    def post(self, url: str, *, data: bytes, headers: Mapping[str, str], allow_redirects: bool = False) -> Call:
        return Call(self, "POST", url, data, headers)

    def get(self, url: str, headers: Mapping[str, str], allow_redirects: bool = False) -> Call:
        assert not allow_redirects, "nobody is followed to another address"
        return Call(self, "GET", url, b"", headers)
