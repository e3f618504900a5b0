"""The doctor reads servers of vLLM's and SGLang's shapes, finds what would keep KV from moving, and asks no more.

Real vLLM was read too: tests/integration/test_vllm_fleet.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web
from workers.sglang_server import listen, sglang_pair

from kvbaton.doctor.examine import How, examine
from kvbaton.doctor.facts import Examination, ServerFacts, Target
from kvbaton.doctor.findings import diagnose
from kvbaton.doctor.look import Answer, skew_of


async def looked_at(*targets: Target, probe: bool = True, api_key: str = "") -> Examination:
    return await examine(targets, "", api_key, How(probe=probe))


def codes(found: Examination) -> list[str]:
    return [finding.code for finding in diagnose(found)]


@dataclass
class VllmShape:
    """A server as vLLM 0.32 was seen to answer, with the side channel of its connector."""

    version: str = "0.32.0"
    root: str = "/models/m"
    block_size: int = 128
    cache_dtype: str = "auto"
    hash: str = "abc"
    layout: str = "HND"
    host: str = "127.0.0.1"  # that its side channel names
    key: str = ""
    connector: bool = True
    silent: bool = False
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    asked: list[bytes] = field(default_factory=list)

    async def start(self, stack: AsyncExitStack, context: zmq.asyncio.Context) -> None:
        self._channel = context.socket(zmq.ROUTER)
        self._channel_port = self._channel.bind_to_random_port("tcp://127.0.0.1")
        task = asyncio.create_task(self._answer_handshakes())
        stack.push_async_callback(asyncio.gather, task, return_exceptions=True)
        stack.callback(task.cancel)
        app = web.Application()
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        self.url = f"http://127.0.0.1:{await listen(stack, app)}"

    async def _answer_handshakes(self) -> None:
        while True:
            client, _, raw = await self._channel.recv_multipart()
            self.asked.append(raw)
            if self.silent:
                continue
            metadata = {"engine_id": "e", "block_size": self.block_size, "kv_cache_layout": self.layout}
            metadata |= {"attn_backend_name": "CPU_ATTN", "num_blocks": 7, "later": [1, b"x"]}
            envelope = {"compatibility_hash": self.hash, "agent_metadata_bytes": msgspec.msgpack.encode(metadata)}
            frames = [client, b"", msgspec.msgpack.encode(envelope), msgspec.msgpack.encode(12.5)]
            await self._channel.send_multipart(frames)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": "m", "root": self.root, "max_model_len": 4096}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        labels = f'block_size="{self.block_size}",cache_dtype="{self.cache_dtype}",num_gpu_blocks="364"'
        return web.Response(text=f"vllm:num_requests_running 0.0\nvllm:cache_config_info{{{labels}}} 1.0\n")

    async def _complete(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        offer = {"remote_host": self.host, "remote_port": self._channel_port, "tp_size": 1, "remote_block_ids": [[1]]}
        return web.json_response({"choices": [{}], "kv_transfer_params": offer if self.connector else None})


@asynccontextmanager
async def vllm_pair(**changes: Any) -> AsyncIterator[tuple[VllmShape, VllmShape]]:
    """``changes`` are the decode server's."""
    context = zmq.asyncio.Context()
    try:
        async with AsyncExitStack() as stack:
            prefill, decode = VllmShape(), VllmShape(**changes)
            for server in (prefill, decode):
                await server.start(stack, context)
            yield prefill, decode
    finally:
        context.destroy(linger=0)


def targets(prefill: Any, decode: Any) -> tuple[Target, Target]:
    return Target("p", "prefill", prefill.url), Target("d", "decode", decode.url)


async def test_two_vllm_servers_that_fit() -> None:
    async with vllm_pair() as (prefill, decode):
        found = await looked_at(*targets(prefill, decode))
        assert codes(found) == []
        facts = found.servers[0]
        assert (facts.engine, facts.version, facts.model, facts.block_size) == ("vllm", "0.32.0", "m", 128)
        assert (facts.compatibility_hash, facts.kv_layout, facts.attention) == ("abc", "HND", "CPU_ATTN")
        (body,) = prefill.bodies
        assert body["max_tokens"] == 1 and body["kv_transfer_params"]["do_remote_decode"] is True
        assert len(body["prompt"]) == 2 * 128 + 1, "two full blocks, or there is nothing to offer"
        (asked,) = prefill.asked
        assert msgspec.msgpack.decode(asked) == [b"get_meta_msg", 0, 0], "a rank that every server has"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hash": "other"}, ["compatibility-hash"]),
        ({"hash": "other", "root": "/elsewhere/m"}, ["compatibility-hash", "model-path"]),
        ({"version": "0.33.0", "hash": "other"}, ["version", "compatibility-hash"]),
        ({"block_size": 64}, ["block-size"]),
        ({"cache_dtype": "fp8"}, ["kv-dtype"]),
        ({"layout": "NHD"}, ["kv-layout"]),
        ({"connector": False}, ["no-connector"]),
        ({"key": "secret"}, ["unreadable"]),
    ],
)
async def test_what_keeps_kv_from_moving_is_found(changes: dict[str, Any], expected: list[str]) -> None:
    async with vllm_pair(**changes) as (prefill, decode):
        assert codes(await looked_at(*targets(prefill, decode))) == expected


async def test_the_key_of_the_servers_is_used() -> None:
    async with vllm_pair(key="secret") as (prefill, decode):
        assert codes(await looked_at(*targets(prefill, decode), api_key="secret")) == []


async def test_without_the_probe_nothing_is_asked_of_a_model() -> None:
    async with vllm_pair(hash="other") as (prefill, decode):
        assert codes(await looked_at(*targets(prefill, decode), probe=False)) == []
        assert prefill.bodies == decode.bodies == prefill.asked == []


async def test_a_side_channel_that_is_silent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbaton.doctor.look_vllm._SIDE_CHANNEL_S", 0.2)
    async with vllm_pair(silent=True) as (prefill, decode):
        assert codes(await looked_at(*targets(prefill, decode))) == ["unread"]


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::"])
async def test_a_side_channel_on_localhost_is_right_on_one_machine_only(host: str) -> None:
    async with vllm_pair() as (prefill, decode):
        prefill.host = host
        here = await looked_at(*targets(prefill, decode))
        assert codes(here) == [] and here.servers[0].compatibility_hash, "its own host is asked, by the name we know"
        moved = [msgspec.structs.replace(one, url=one.url.replace("127.0.0.1", "10.0.0.9")) for one in here.servers]
        assert "localhost" in codes(Examination(tuple(moved)))


async def test_two_sglang_servers_that_fit_and_one_that_does_not() -> None:
    async with sglang_pair() as (prefill, decode):
        found = await looked_at(*targets(prefill, decode))
        assert codes(found) == []
        facts = found.servers[0]
        assert (facts.engine, facts.version, facts.block_size) == ("sglang", "0.6.1", 16)
        assert facts.kv_port == prefill.bootstrap_port
        prefill.bootstrap |= {"page_size": 64, "kv_cache_dtype": "fp8_e4m3", "attn_tp_size": 3}
        decode.info["tp_size"] = 4
        assert codes(await looked_at(*targets(prefill, decode))) == ["kv-dtype", "block-size", "tp"]
        prefill.registered = False
        assert "kv-port" in codes(await looked_at(*targets(prefill, decode)))
        swapped = (Target("p", "prefill", decode.url), Target("d", "decode", prefill.url))
        assert codes(await looked_at(*swapped))[:2] == ["role", "role"]


async def test_a_server_of_no_known_kind_is_told() -> None:
    async with AsyncExitStack() as stack:
        url = f"http://127.0.0.1:{await listen(stack, web.Application())}"
        (facts,) = (await looked_at(Target("x", "decode", url))).servers
        assert "which engine is it" in facts.trouble


def test_the_clock_is_read_from_the_date() -> None:
    dated = Answer(200, b"", {"date": "Thu, 01 Jan 2015 00:00:00 GMT"}, 0.1)
    skew_s = skew_of(dated)
    assert skew_s is not None and skew_s < -10 * 365 * 86400
    assert skew_of(Answer(200, b"", {}, 0.1)) is None and skew_of(Answer(200, b"", {"date": "soon"}, 0.1)) is None
    facts = ServerFacts("d", "decode", "http://h:1", engine="kvbaton", skew_s=skew_s)
    assert "clock" in codes(Examination((facts, ServerFacts("p", "prefill", "http://h:2", engine="kvbaton"))))


async def test_an_answer_without_end_is_cut() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * (1 << 20))

    async with AsyncExitStack() as stack:
        app = web.Application()
        app.router.add_get("/version", endless)
        url = f"http://127.0.0.1:{await listen(stack, app)}"
        (facts,) = (await looked_at(Target("x", "decode", url))).servers
        assert "more than" in facts.trouble
