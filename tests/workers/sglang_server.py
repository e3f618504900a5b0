"""Servers that answer as SGLang's public sources say: a prefill and a decode server that meet in a room.

As the real ones do, decode waits for its prefill for ever, and a request with a field nobody knows is refused. The
lists of fields are data, with their sources (``engine_fields/sglang.json``). No code of SGLang's is in here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from kvbaton.transfer.reach import in_url

FIELDS = json.loads((Path(__file__).parent / "engine_fields" / "sglang.json").read_text())
METRICS = """
sglang:num_running_reqs{model_name="m"} 0.0
sglang:num_queue_reqs{model_name="m"} 0.0
sglang:token_usage{model_name="m"} 0.5
sglang:cache_config_info{page_size="16",num_pages="64"} 1.0
"""


class Room:
    def __init__(self) -> None:
        self.prefilled = asyncio.Event()
        self.awaited = asyncio.Event()


class FakeSglang:
    """One server, with its bootstrap server when it prefills."""

    def __init__(self, mode: str | None, rooms: dict[int, Room]) -> None:
        self.mode, self.rooms = mode, rooms
        self.tokens = [11, 12, 13]
        self.ending: dict[str, Any] = {"type": "length", "length": 3}
        self.incremental = False
        self.status = 200
        self.stream: bytes | None = None  # instead of an answer
        self.hold = asyncio.Event()
        self.hold.set()
        self.bodies: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.num_open = 0
        self.metrics = METRICS
        self.key, self.name = "", "m"
        self.info: dict[str, Any] = {"page_size": 16, "kv_cache_dtype": "bfloat16", "tp_size": 1, "dp_size": 1}
        self.bootstrap: dict[str, Any] = {
            "attn_tp_size": 1,
            "attn_cp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "page_size": 16,
            "kv_cache_dtype": "bfloat16",
            "follow_bootstrap_room": True,
            "enable_dsa_cache_layer_split": False,
            "prefill_http_port": None,
        }
        assert set(self.bootstrap) == set(FIELDS["bootstrap_info"])
        self.registered = True
        self.hides = False  # what it is
        self.host, self.port, self.bootstrap_port = "127.0.0.1", 0, 0

    @property
    def url(self) -> str:
        return f"http://{in_url(self.host)}:{self.port}"

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        unknown = {*body} - {*FIELDS["generate_request"]} | {*body["sampling_params"]} - {*FIELDS["sampling_params"]}
        if unknown:
            return web.json_response({"error": {"message": f"unknown: {unknown}"}}, status=400)
        self.bodies.append(body)
        self.num_open += 1
        try:
            await self.hold.wait()
            if self.status != 200:
                return web.json_response({"error": {"message": "it broke"}}, status=self.status)
            if self.mode is not None:
                await self._meet(body)
            return await (self._stream(request, body) if body["stream"] else self._whole(body))
        finally:
            self.num_open -= 1

    async def _meet(self, body: dict[str, Any]) -> None:
        room = self.rooms.setdefault(body["bootstrap_room"], Room())
        mine, theirs = (room.prefilled, room.awaited) if self.mode == "prefill" else (room.awaited, room.prefilled)
        mine.set()
        await theirs.wait()

    def _part(self, body: dict[str, Any], num: int, num_before: int) -> dict[str, Any]:
        ids = self.tokens[num_before if self.incremental else 0 : num]
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": self.ending if num == len(self.tokens) else None,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": num,
            "cached_tokens": 2,
            "weight_version": "default",
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
            meta["output_top_logprobs"] = [[[-0.5, token, None], [-0.7, 99, None]] for token in ids]
        assert {*meta} <= {*FIELDS["meta_info"]}
        return {"text": "x" * num, "output_ids": ids, "meta_info": meta}

    async def _whole(self, body: dict[str, Any]) -> web.Response:
        return web.json_response(self._part(body, len(self.tokens), 0))

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if self.stream is not None:
            await response.write(self.stream)
            return response
        for num in range(1, len(self.tokens) + 1):
            part = json.dumps(self._part(body, num, num - 1))
            await response.write(f"data: {part}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def server_info(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.hides:
            return web.json_response({})
        told = {
            **self.info,
            "version": "0.6.1",
            "served_model_name": self.name,
            "disaggregation_mode": self.mode or "null",
            "disaggregation_bootstrap_port": self.bootstrap_port or 8998,
            "context_length": 64,
            "max_total_num_tokens": 1024,
        }
        return web.json_response(told)

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def route(self, request: web.Request) -> web.Response:
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        if any(request.query.get(name) != "-1" for name in names):
            return web.Response(text="Missing inputs", status=400)
        if not self.registered:
            return web.Response(text="not fully registered yet", status=503)
        return web.json_response(self.bootstrap)

    async def version(self, request: web.Request) -> web.Response:
        return web.Response(text="no such page", status=404)

    async def start(self, stack: AsyncExitStack) -> None:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/metrics", self.show_metrics)
        app.router.add_get("/version", self.version)
        self.port = await listen(stack, app, self.host)
        if self.mode == "prefill":
            bootstrap = web.Application()
            bootstrap.router.add_get("/route", self.route)
            self.bootstrap_port = await listen(stack, bootstrap, self.host)
            self.bootstrap["prefill_http_port"] = self.port


async def listen(stack: AsyncExitStack, app: web.Application, host: str = "127.0.0.1") -> int:
    runner = web.AppRunner(app, shutdown_timeout=1, handler_cancellation=True)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, host, 0).start()
    port: int = runner.addresses[0][1]
    return port


@asynccontextmanager
async def sglang_pair(host: str = "127.0.0.1") -> AsyncIterator[tuple[FakeSglang, FakeSglang]]:
    async with AsyncExitStack() as stack:
        rooms: dict[int, Room] = {}
        prefill, decode = FakeSglang("prefill", rooms), FakeSglang("decode", rooms)
        prefill.host = decode.host = host
        await prefill.start(stack)
        await decode.start(stack)
        yield prefill, decode
