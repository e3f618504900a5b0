"""The doctor on workers of ours over servers of other engines' shapes: what is healthy has no error, and hands off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from workers.sglang_server import FakeSglang, listen, sglang_pair
from workers.test_trtllm import FakeTrtllm
from workers.test_vllm_mooncake import Fleet

from kvbaton.config import ModelSettings, WorkerSettings
from kvbaton.doctor.examine import How, examine
from kvbaton.doctor.facts import Examination, Keys, Target
from kvbaton.doctor.findings import Finding, diagnose
from kvbaton.transfer.reach import in_url
from kvbaton.types import Role
from kvbaton.workers.process import run_worker
from kvbaton.workers.vllm_server import key_for_servers

KEY = "k" * 20


@asynccontextmanager
async def worker(
    engine: Any,
    role: Role,
    url: str,
    model_dir: Path,
    bootstrap_port: int = 0,
    kv_host: str = "",
    host: str = "127.0.0.1",
) -> AsyncIterator[str]:
    """Its address. It is closed, as one that others can reach."""
    settings = WorkerSettings(
        engine=engine,
        engine_url=url,
        role=role,
        port=0,
        clients="refuse",
        engine_bootstrap_port=bootstrap_port,
        host=host,
        kv_host=kv_host,
        drain_s=0.0,  # the figures of one kind of server here say for ever that a request runs
    )
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()

    def report(what: str, **about: Any) -> None:
        if what == "ready":
            ready.set_result(f"http://{in_url(host)}:{about['port']}")

    serving = asyncio.ensure_future(
        run_worker(ModelSettings(dir=str(model_dir), name="m"), settings, KEY, stop, report)
    )
    try:
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        yield ready.result() if ready.done() else serving.result()
    finally:
        stop.set()
        await serving


@asynccontextmanager
async def pair_over(
    engine: str, prefill: str, decode: str, model_dir: Path, bootstrap_port: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[Target, Target]]:
    async with (
        worker(engine, "prefill", prefill, model_dir, host=host) as ours,
        worker(engine, "decode", decode, model_dir, bootstrap_port, host=host) as theirs,
    ):
        yield Target("p", "prefill", ours), Target("d", "decode", theirs)


async def looked_at(*targets: Target, tokens: int = 8, **keys: str) -> tuple[Examination, list[Finding]]:
    found = await examine(targets, Keys(KEY, **keys), How(num_tokens=tokens, repeats=2))
    return found, diagnose(found)


async def test_workers_over_sglang_hand_off_without_a_call_to_prefill_alone(tiny_model_dir: Path) -> None:
    async with sglang_pair() as (prefill, decode):
        for server in (prefill, decode):
            server.tokens, server.ending = [11, 12], {"type": "length", "length": 2}
        async with pair_over("sglang", prefill.url, decode.url, tiny_model_dir) as targets:
            found, findings = await looked_at(*targets)
            assert findings == []
            (pair,) = found.pairs
            assert pair.num_bytes > 0 and pair.repeats == 2 and pair.gb_per_s is None
            assert [len(body["input_ids"]) for body in prefill.bodies] == [8, 8]
            decode.tokens = prefill.tokens = [11, 12, 13]
            _, findings = await looked_at(*targets)
            assert [one.code for one in findings] == ["hand-off"], "more tokens than were asked for"


async def test_workers_over_sglang_on_several_ranks_have_one_fingerprint(tiny_model_dir: Path) -> None:
    async with sglang_pair() as (prefill, decode):
        for server in (prefill, decode):
            server.tokens, server.ending = [11, 12], {"type": "length", "length": 2}
        prefill.info["tp_size"] = prefill.bootstrap["attn_tp_size"] = 2
        decode.info["tp_size"] = 4
        async with pair_over("sglang", prefill.url, decode.url, tiny_model_dir) as targets:
            found, findings = await looked_at(*targets)
            assert findings == [] and found.pairs[0].num_bytes > 0


async def test_workers_over_trtllm_hand_off_without_a_salt_and_their_servers_are_read(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTLLM_API_KEY", "secret")
    async with AsyncExitStack() as stack:
        prefill, decode = FakeTrtllm(), FakeTrtllm()
        for server in (prefill, decode):
            await server.start(stack)
            server.tokens, server.key = [11, 12], "secret"
        async with pair_over("trtllm", prefill.url, decode.url, tiny_model_dir) as targets:
            found, findings = await looked_at(*targets, trtllm="secret")
            assert [(one.severity, one.code) for one in findings] == [("info", "untold")] * 2
            assert found.pairs[0].num_bytes > 0 and found.pairs[0].gb_per_s is None
            assert [body["disaggregated_params"]["request_type"] for body in prefill.bodies] == ["context_only"] * 2
            behind = found.servers[1]
            assert (behind.name, behind.engine, behind.version) == ("p's TensorRT-LLM", "trtllm", "1.3.0")
            _, findings = await looked_at(*targets)
            assert [one.code for one in findings] == ["unreadable"] * 2
            assert all("set TRTLLM_API_KEY" in one.fix for one in findings)


class Mooncake(Fleet):
    """Servers with MooncakeConnector that want ``key``. ``figures``: what those of their connector are called."""

    def __init__(self, key: str, figures: str) -> None:
        super().__init__()
        self.key = key
        self.prefill.tokens, self.decode.tokens = [11], [11, 12]
        for server in (self.prefill, self.decode):
            server.metrics = server.metrics.replace("vllm:nixl_bytes_transferred_sum", figures)

    async def start(self, stack: AsyncExitStack) -> tuple[str, str, int]:
        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            told = request.headers.get("authorization")
            if self.key and request.path.startswith("/v1") and told != f"Bearer {self.key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
            answer: web.StreamResponse = await handler(request)
            return answer

        urls = []
        for server in (self.prefill, self.decode):
            app = server.app()
            app.middlewares.append(guard)
            urls.append(f"http://127.0.0.1:{await listen(stack, app)}")
        port = await listen(stack, self.bootstrap())
        self.address = f"http://127.0.0.1:{port}"
        return urls[0], urls[1], port


@pytest.mark.parametrize("figures", ["vllm:mooncake_xfer_time_seconds_sum", "vllm:of_an_older_version"])
async def test_workers_over_servers_with_mooncakeconnector(tiny_model_dir: Path, figures: str) -> None:
    async with AsyncExitStack() as stack:
        fleet = Mooncake("", figures)
        prefill, decode, port = await fleet.start(stack)
        targets = await stack.enter_async_context(
            pair_over("vllm", prefill, decode, tiny_model_dir, bootstrap_port=port)
        )
        found, findings = await looked_at(*targets)
        assert findings == [], findings
        behind = [one for one in found.servers if one.behind]
        assert [one.connector_name for one in behind] == ["MooncakeConnector"] * 2
        assert behind[0].kv_port == port and found.pairs[0].num_bytes > 0
        offered = [body.get("kv_transfer_params") for body in fleet.decode.bodies]
        assert offered and all(one["do_remote_decode"] is False for one in offered), "it would end if it were asked"
        fleet.engines = {}
        _, findings = await looked_at(*targets)
        assert "kv-port" in [one.code for one in findings]
        assert any("--engine-bootstrap-port" in one.fix for one in findings)


@pytest.mark.parametrize("own", [True, False])
async def test_the_servers_have_a_key_of_their_own_or_one_made_from_the_fleets(
    tiny_model_dir: Path, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret" if own else "")
    key = "secret" if own else key_for_servers(KEY)
    async with AsyncExitStack() as stack:
        fleet = Mooncake(key, "vllm:mooncake_xfer_time_seconds_sum")
        prefill, decode, port = await fleet.start(stack)
        targets = await stack.enter_async_context(
            pair_over("vllm", prefill, decode, tiny_model_dir, bootstrap_port=port)
        )
        _, findings = await looked_at(*targets, vllm="secret")
        assert findings == [], "the one that is given is tried, then the other"
        _, findings = await looked_at(*targets)
        assert [one.code for one in findings] == (["unreadable"] * 2 if own else [])
        assert all("set VLLM_API_KEY" in one.fix for one in findings)


async def test_sglang_servers_that_do_both_are_behind_workers_that_do(tiny_model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        server = FakeSglang(None, {})
        await server.start(stack)
        address = await stack.enter_async_context(worker("sglang", "both", server.url, tiny_model_dir))
        _, findings = await looked_at(Target("b", "both", address))
        assert findings == []
