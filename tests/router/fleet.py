"""A whole fleet in one process over real sockets: scripted workers behind real worker servers, and a real router."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from workers.scripted import ScriptedWorker, serving, until

from kvbaton.clock import MonotonicClock
from kvbaton.config import MemberSettings, RouterSettings
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.observe.metrics import Metrics
from kvbaton.router.dispatch import Dispatcher
from kvbaton.router.gateway import Gateway, Served
from kvbaton.router.monitor import Monitor
from kvbaton.router.prefix_index import PrefixIndex
from kvbaton.router.process import open_client, open_session
from kvbaton.router.registry import Registry
from kvbaton.types import Role
from kvbaton.workers.server import ServerOptions, WorkerServer

KEY = "k" * 20
LONG = "a prompt of many tokens " * 8
SHORT = "short"


@dataclass
class Fleet:
    url: str
    gateway: Gateway
    dispatcher: Dispatcher
    registry: Registry
    monitor: Monitor
    metrics: Metrics
    workers: dict[str, ScriptedWorker]
    servers: dict[str, WorkerServer]
    stops: dict[str, AsyncExitStack]
    http: aiohttp.ClientSession
    urls: dict[str, str] = field(default_factory=dict)

    async def poll(self) -> None:
        for member in self.registry.members:
            await self.monitor.poll(member)

    async def kill(self, name: str) -> None:
        """Its socket closes; nobody told the router."""
        await self.stops[name].aclose()

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, Any, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        payload = data if len(data) < 1 << 20 else io.BytesIO(data)
        async with self.http.post(self.url + path, data=payload, headers=headers) as response:
            raw = await response.read()
            answer = json.loads(raw) if response.content_type == "application/json" else raw
            return response.status, answer, response.headers

    async def settled(self) -> None:
        """A client has its answer a moment before the router has written its record."""
        await until(lambda: self.gateway.open.num == 0)

    def counter(self, line: str) -> float:
        """Value of one series; 0 when it does not exist."""
        for text in self.metrics.exposition().decode().splitlines():
            if text.startswith(line + " "):
                return float(text.rsplit(" ", 1)[1])
        return 0.0

    def check_idle(self) -> None:
        """Nothing is held anywhere once every request has ended."""
        self.registry.check()
        assert self.gateway.open.num == 0
        for member in self.registry.members:
            assert (member.own_requests, member.own_sequences, member.own_tokens) == (0, 0, 0)
        for worker in self.workers.values():
            assert worker.num_open == 0


@asynccontextmanager
async def running_fleet(tokenizer: Tokenizer, roles: dict[str, Role], **settings: Any) -> AsyncIterator[Fleet]:
    """``roles``: name -> role of each scripted worker. Every member has been polled once.

    Routed by a static threshold unless told otherwise, so that what is under test does not hang on estimates.
    """
    async with AsyncExitStack() as stack:
        workers, servers, stops, urls = {}, {}, {}, {}
        for name, role in roles.items():
            workers[name] = ScriptedWorker(tokenizer, role, text=f"hello from {name}", life=f"{name}-1")
            servers[name] = WorkerServer(workers[name], ServerOptions(block_size=16, internal_key=KEY))
            stops[name] = await stack.enter_async_context(AsyncExitStack())
            urls[name] = await stops[name].enter_async_context(serving(servers[name]))
        members = [MemberSettings(urls[name], role, name) for name, role in roles.items()]
        router, clock, metrics = (
            RouterSettings(**{"threshold_tokens": 64, **settings}),
            MonotonicClock(),
            Metrics("router"),
        )
        index = PrefixIndex(router.index_block_tokens, router.index_blocks, router.index_exact_blocks)
        registry = Registry(members, "tiny", index, metrics)
        session = await stack.enter_async_context(open_session(router))
        client = await stack.enter_async_context(open_client(router))
        dispatcher = Dispatcher(registry, index, client, router, KEY, metrics, clock)
        gateway = Gateway(registry, dispatcher, Served("tiny", tokenizer), router, KEY, metrics, clock)
        stack.callback(gateway.close)
        url = await stack.enter_async_context(serving(gateway, half_closes=True))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        monitor = Monitor(registry, index, session, router, KEY, metrics)
        fleet = Fleet(url, gateway, dispatcher, registry, monitor, metrics, workers, servers, stops, http, urls)
        await fleet.poll()
        yield fleet
        await fleet.settled()
        # A worker learns from its closing connection that nobody waits any more.
        await until(lambda: all(worker.num_open == 0 for worker in workers.values()))
        fleet.check_idle()


class RawWorker:
    """An ASGI app that says it is a worker and then answers with the bytes it was given."""

    def __init__(self, info: bytes, parts: list[bytes], status: int = 200, headers: Any = ()) -> None:
        self.info, self.parts, self.status, self.extra = info, parts, status, list(headers)
        self.seen: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/internal/info":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": self.info})
            return
        self.seen.append(dict(scope["headers"]))
        while (await receive()).get("more_body"):
            pass
        kind = b"text/event-stream" if self.status == 200 else b"application/json"
        await send(
            {"type": "http.response.start", "status": self.status, "headers": [(b"content-type", kind), *self.extra]}
        )
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def ask_raw(tokenizer: Tokenizer, worker: RawWorker, body: Any, **headers: str) -> tuple[int, Any, Any]:
    async with running_fleet(tokenizer, {}, queue_timeout_s=0.3) as fleet, serving(worker) as address:
        fleet.registry.set_members([MemberSettings(address, "both", "raw")])
        await fleet.poll()
        return await fleet.post(body, **headers)
