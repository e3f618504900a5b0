"""A fleet of real engines over real sockets, with a fault proxy before every HTTP port and every hand-off port.

The reference is one worker that prefills and decodes by itself, asked without router and without proxies.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from router.fleet import KEY, Fleet, running_fleet
from router.gates import until_empty
from workers.scripted import serving

from kvbaton.bench.fault_proxy import FaultProxy
from kvbaton.config import MemberSettings
from kvbaton.engine.engine import EngineConfig
from kvbaton.engine.loader import LoadOptions
from kvbaton.engine.scheduler import SchedulerConfig
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.transfer.options import HandoffOptions
from kvbaton.types import Role
from kvbaton.workers.native import NativeWorker, WorkerOptions
from kvbaton.workers.server import ServerOptions, WorkerServer

# A hand-off's own waits. Where nobody falls silent they never end one, however slow the machine is ...
PATIENT = HandoffOptions(transport="tcp", connect_s=60.0, frame_s=60.0, heartbeat_s=9.0, silence_s=60.0, stall_s=60.0)
# ... where somebody does they bound how long the test takes.
BRISK = HandoffOptions(transport="tcp", lease_s=30.0, connect_s=1.5, heartbeat_s=0.1, silence_s=2.0, stall_s=1.0)


@dataclass
class Told:
    """A client's whole experience of one request."""

    status: int
    headers: Any
    ids: set[str] = field(default_factory=set)
    created: set[int] = field(default_factory=set)
    texts: dict[int, str] = field(default_factory=dict)
    roles: dict[int, int] = field(default_factory=dict)
    finish: dict[int, list[str]] = field(default_factory=dict)
    tokens: dict[int, list[Any]] = field(default_factory=dict)  # as logprobs name them
    offsets: dict[int, list[int]] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False

    @property
    def answer(self) -> tuple[Any, ...]:
        """What must be equal wherever and however often it was computed. Cached tokens depend on who had what."""
        usage = {k: v for k, v in (self.usage or {}).items() if k != "prompt_tokens_details"}
        return self.texts, self.finish, self.tokens, self.offsets, self.roles, usage, self.done, self.error


def read_stream(raw: bytes, status: int, headers: Any) -> Told:
    told = Told(status, headers)
    assert raw.endswith(b"\n\n")
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        assert not told.done and told.error is None, "something follows the end"
        assert block.startswith("data: "), f"a client must see no comment of ours: {block}"
        data = block.removeprefix("data: ")
        if data == "[DONE]":
            told.done = True
            continue
        event = json.loads(data)
        if "error" in event:
            told.error = event["error"]
            continue
        told.ids.add(event["id"])
        told.created.add(event["created"])
        told.usage = event.get("usage") or told.usage
        for choice in event["choices"]:
            _take(told, choice)
    return told


def _take(told: Told, choice: dict[str, Any]) -> None:
    index = choice["index"]
    delta = choice.get("delta", choice)
    told.texts[index] = told.texts.get(index, "") + (delta.get("text") or delta.get("content") or "")
    if "role" in delta:
        told.roles[index] = told.roles.get(index, 0) + 1
    if choice.get("finish_reason"):
        told.finish.setdefault(index, []).append(choice["finish_reason"])
    logprobs = choice.get("logprobs")
    if logprobs and "content" in logprobs:
        told.tokens.setdefault(index, []).extend(logprobs["content"])
    elif logprobs:
        told.tokens.setdefault(index, []).extend(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))
        told.offsets.setdefault(index, []).extend(logprobs["text_offset"])


async def stream(http: aiohttp.ClientSession, url: str, body: dict[str, Any], **headers: str) -> Told:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = {"stream": True, "stream_options": {"include_usage": True}, **body}
    async with http.post(url + path, json=body, headers=headers) as response:
        raw = await response.read()
        if response.status != 200:
            return Told(response.status, response.headers, error=json.loads(raw)["error"])
        return read_stream(raw, response.status, response.headers)


@dataclass
class Rig:
    fleet: Fleet
    reference_url: str
    workers: dict[str, NativeWorker]
    servers: dict[str, WorkerServer]
    http_proxies: dict[str, FaultProxy]  # between router and worker
    kv_proxies: dict[str, FaultProxy]  # between decode and prefill workers
    stack: AsyncExitStack

    async def ask(self, body: dict[str, Any], **headers: str) -> Told:
        return await stream(self.fleet.http, self.fleet.url, body, **headers)

    async def expected(self, body: dict[str, Any]) -> Told:
        told = await stream(self.fleet.http, self.reference_url, body)
        assert told.status == 200 and told.done and told.error is None
        return told

    def heal(self) -> None:
        for proxy in (*self.http_proxies.values(), *self.kv_proxies.values()):
            proxy.heal()

    def replays(self, cause: str) -> float:
        return self.fleet.counter(f'kvbaton_router_replays_total{{cause="{cause}"}}')

    def retries(self, cause: str) -> float:
        return self.fleet.counter(f'kvbaton_router_retries_total{{cause="{cause}"}}')

    async def check_empty(self) -> None:
        """No block, pin, lease, request or hold anywhere, once everything was answered."""
        await self.fleet.settled()
        self.fleet.check_idle()
        for worker in self.workers.values():
            await until_empty(worker)


def native_worker(model_dir: Path, role: Role, handoff: HandoffOptions, **options: Any) -> NativeWorker:
    scheduler = SchedulerConfig(max_batch_tokens=options.pop("chunk_tokens", 64), max_running=16)
    load = LoadOptions(model_dir=model_dir, dtype="float32", num_kv_blocks=options.pop("kv_blocks", 256))
    return NativeWorker(
        load, EngineConfig(scheduler=scheduler, lease_s=handoff.lease_s), WorkerOptions(role=role, handoff=handoff)
    )


async def serve(stack: AsyncExitStack, worker: NativeWorker) -> tuple[WorkerServer, str]:
    await worker.start()
    stack.push_async_callback(worker.stop)
    server = WorkerServer(worker, ServerOptions(block_size=16, model_name="tiny", internal_key=KEY))
    return server, await stack.enter_async_context(serving(server))


async def before(stack: AsyncExitStack, host: str, port: int) -> FaultProxy:
    return await stack.enter_async_context(FaultProxy(host, port))


@asynccontextmanager
async def make_rig(
    model_dir: Path, roles: dict[str, Role], handoff: HandoffOptions = PATIENT, **settings: Any
) -> AsyncIterator[Rig]:
    """Every prompt is handed over if there is anybody to hand it over. Empty again at the end, or it fails."""
    async with AsyncExitStack() as stack:
        _, reference_url = await serve(stack, native_worker(model_dir, "both", handoff))
        workers, servers, members = {}, {}, []
        http_proxies: dict[str, FaultProxy] = {}
        kv_proxies: dict[str, FaultProxy] = {}
        for name, role in roles.items():
            workers[name] = native_worker(model_dir, role, handoff)
            servers[name], url = await serve(stack, workers[name])
            parts = urlsplit(url)
            http_proxies[name] = await before(stack, parts.hostname or "", parts.port or 0)
            kv_address = ""
            if role != "decode":
                kv_proxies[name] = await before(stack, "127.0.0.1", workers[name].kv_port)
                kv_address = f"127.0.0.1:{kv_proxies[name].port}"
            url = f"http://127.0.0.1:{http_proxies[name].port}"
            members.append(MemberSettings(url, role, name, kv_address=kv_address))
        fleet = await stack.enter_async_context(
            running_fleet(Tokenizer.load(model_dir), {}, **{"threshold_tokens": 0, **settings})
        )
        fleet.registry.set_members(members)
        await fleet.poll()
        rig = Rig(fleet, reference_url, workers, servers, http_proxies, kv_proxies, stack)
        yield rig
        rig.heal()
        await rig.check_empty()
