"""The doctor reads servers of other engines' shapes, finds what would keep KV from moving, and asks no more.

Real vLLM was read too: tests/integration/test_vllm_fleet.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web
from workers.sglang_server import FakeSglang, listen, sglang_pair
from workers.test_trtllm import FakeTrtllm

from kvbaton.doctor.examine import How, examine
from kvbaton.doctor.facts import Examination, Keys, ServerFacts, Target
from kvbaton.doctor.findings import diagnose
from kvbaton.doctor.look import Answer, skew_of
from kvbaton.doctor.report import report_text


async def looked_at(*targets: Target, probe: bool = True, keys: Keys = Keys()) -> Examination:  # noqa: B008
    return await examine(targets, keys, How(probe=probe))


def codes(found: Examination) -> list[str]:
    return [finding.code for finding in diagnose(found)]


CONNECTOR_FIGURES = {
    "nixl": "vllm:nixl_num_descriptors_sum 0.0\n",
    "mooncake": 'vllm:mooncake_xfer_time_seconds_bucket{le="+Inf"} 0.0\n',
    "": "",
}


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
    connector: str = "nixl"  # whose figures it shows
    offers: bool = True
    silent: bool = False
    pulls: tuple[int, float] = (4096, 0.5)  # bytes and seconds that it counts for each of its transfers
    refuses: str = ""  # to pull, in its words
    moved: tuple[float, float] = (0, 0.0)
    on_pull: Callable[[], object] = object
    hidden: bool = False  # its figures cannot be read
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
        if self.hidden:
            return web.Response(status=503)
        labels = f'block_size="{self.block_size}",cache_dtype="{self.cache_dtype}",num_gpu_blocks="364"'
        text = f"vllm:num_requests_running 0.0\nvllm:cache_config_info{{{labels}}} 1.0\n"
        if self.connector == "nixl":
            for rank in range(2):
                text += f'vllm:nixl_bytes_transferred_sum{{engine="{rank}"}} {self.moved[0] / 2}\n'
                text += f'vllm:nixl_xfer_time_seconds_sum{{engine="{rank}"}} {self.moved[1] / 2}\n'
        return web.Response(text=text + CONNECTOR_FIGURES[self.connector])

    async def _complete(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        assert self.connector == "nixl", "a decode server with MooncakeConnector ends when it is asked for an offer"
        if "remote_block_ids" in self.bodies[-1]["kv_transfer_params"]:
            if self.refuses:
                return web.json_response({"error": {"message": self.refuses}}, status=500)
            self.moved = (self.moved[0] + self.pulls[0], self.moved[1] + self.pulls[1])
            self.on_pull()
            return web.json_response({"choices": [{}], "kv_transfer_params": None})
        offer = {"remote_host": self.host, "remote_port": self._channel_port, "tp_size": 1, "remote_block_ids": [[1]]}
        return web.json_response({"choices": [{}], "kv_transfer_params": offer if self.offers else None})


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
        ({"connector": ""}, ["no-connector"]),
        ({"connector": "mooncake"}, ["connector"]),
        ({"offers": False}, ["unread"]),
        ({"key": "secret"}, ["unreadable"]),
    ],
)
async def test_what_keeps_kv_from_moving_is_found(changes: dict[str, Any], expected: list[str]) -> None:
    async with vllm_pair(**changes) as (prefill, decode):
        assert codes(await looked_at(*targets(prefill, decode))) == expected


async def test_what_connector_a_server_has_is_told_by_its_figures_or_not_known_and_neither_is_an_error() -> None:
    for connector, expected in (("mooncake", []), ("", ["connector-unknown"] * 2)):
        async with vllm_pair(connector=connector) as (prefill, decode):
            prefill.connector = connector
            found = await looked_at(*targets(prefill, decode))
            assert codes(found) == expected and all(one.severity == "info" for one in diagnose(found))
            assert found.servers[0].connector_name == ("MooncakeConnector" if connector else "")
            assert prefill.bodies == decode.bodies == []


async def test_the_key_of_the_servers_is_used() -> None:
    async with vllm_pair(key="secret") as (prefill, decode):
        assert codes(await looked_at(*targets(prefill, decode), keys=Keys(vllm="secret"))) == []


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


async def test_an_sglang_server_with_a_key_is_known_by_its_figures_and_its_variable_is_named() -> None:
    async with sglang_pair() as (prefill, decode):
        prefill.key = decode.key = "secret"
        found = await looked_at(*targets(prefill, decode), keys=Keys(vllm="secret"))
        assert codes(found) == ["unreadable"] * 2
        assert all("set SGLANG_API_KEY" in finding.fix for finding in diagnose(found))
        assert codes(await looked_at(*targets(prefill, decode), keys=Keys(sglang="secret"))) == []


async def test_an_sglang_server_that_does_both_needs_no_connector() -> None:
    async with AsyncExitStack() as stack:
        server = FakeSglang(None, {})
        await server.start(stack)
        assert codes(await looked_at(Target("b", "both", server.url))) == []


async def test_two_trtllm_servers_are_read_and_what_they_do_not_tell_is_said() -> None:
    async with AsyncExitStack() as stack:
        prefill, decode = FakeTrtllm(), FakeTrtllm()
        for server in (prefill, decode):
            await server.start(stack)
        found = await looked_at(*targets(prefill, decode))
        facts = found.servers[0]
        assert (facts.engine, facts.version, facts.model, facts.block_size) == ("trtllm", "1.3.0", "m", 32)
        findings = diagnose(found)
        assert [(one.severity, one.code) for one in findings] == [("info", "untold")] * 2
        assert "KV dtype" in findings[0].what and "nothing is wrong" in report_text(found, findings)
        assert prefill.bodies == decode.bodies == []
        decode.version, decode.model = "1.4.0", "other"
        decode.metrics = decode.metrics.replace("per_block 32", "per_block 64")
        assert codes(await looked_at(*targets(prefill, decode)))[:3] == ["version", "model", "block-size"]
        decode.key = "secret"
        refused = await looked_at(*targets(prefill, decode))
        assert "set TRTLLM_API_KEY" in diagnose(refused)[0].fix
        assert "unreadable" not in codes(await looked_at(*targets(prefill, decode), keys=Keys(trtllm="secret")))


async def test_a_server_that_lets_nobody_see_what_it_is_names_all_keys() -> None:
    async def closed(request: web.Request) -> web.Response:
        return web.Response(status=401)

    async with AsyncExitStack() as stack:
        app = web.Application()
        app.router.add_get("/{page:.*}", closed)
        url = f"http://127.0.0.1:{await listen(stack, app)}"
        (finding,) = [one for one in diagnose(await looked_at(Target("x", "both", url))) if one.subject == "x"]
        assert "VLLM_API_KEY, SGLANG_API_KEY, TRTLLM_API_KEY" in finding.fix


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
