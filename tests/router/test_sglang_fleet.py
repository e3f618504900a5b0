"""A router before SGLang workers: a server for decode computes no prompt, so nothing is served but by a pair."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from router.fleet import KEY, SHORT, Fleet, running_fleet
from workers.scripted import serving, sse_events
from workers.sglang_server import FakeSglang, Room

from kvbaton.config import MemberSettings
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.router.canary import Canary
from kvbaton.router.registry import Registry
from kvbaton.types import Role
from kvbaton.workers.server import ServerOptions, WorkerServer
from kvbaton.workers.sglang import SglangOptions, SglangWorker

ROLES: dict[str, Role] = {"p0": "prefill", "d0": "decode"}


@dataclass
class SglangFleet:
    fleet: Fleet
    servers: dict[str, FakeSglang]
    lives: dict[str, AsyncExitStack]  # each server's, with the worker before it

    async def kill(self, name: str) -> None:
        await self.lives[name].aclose()


async def make_fleet(
    model_dir: Path, stack: AsyncExitStack, roles: dict[str, Role] | None = None, **settings: Any
) -> SglangFleet:
    """Nobody ever waits long enough for room: what waits for it hangs."""
    settings = {"threshold_tokens": None, "queue_timeout_s": 3600.0, **settings}
    rooms: dict[int, Room] = {}
    servers, lives, members = {}, {}, []
    for name, role in (roles or ROLES).items():
        lives[name] = life = await stack.enter_async_context(AsyncExitStack())
        servers[name] = server = FakeSglang(role, rooms)
        await server.start(life)
        options = SglangOptions(server.url, role, "m")
        worker = SglangWorker(options, ModelConfig.from_dir(model_dir), Tokenizer.load(model_dir))
        await worker.start()
        life.push_async_callback(worker.stop)
        app = WorkerServer(worker, ServerOptions(block_size=16, model_name="tiny", internal_key=KEY))
        members.append(MemberSettings(await life.enter_async_context(serving(app)), role, name))
    fleet = await stack.enter_async_context(running_fleet(Tokenizer.load(model_dir), {}, **settings))
    fleet.registry.set_members(members)
    await fleet.poll()
    return SglangFleet(fleet, servers, lives)


@pytest.fixture
async def sglang(tiny_model_dir: Path) -> AsyncIterator[SglangFleet]:
    async with AsyncExitStack() as stack:
        yield await make_fleet(tiny_model_dir, stack)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"threshold_tokens": 10**6},
        {"policy": "static", "threshold_tokens": 10**6},
        {"policy": "least_load", "threshold_tokens": 10**6},
        {"policy": "round_robin", "threshold_tokens": 10**6},
        {"disagg_percent": 0.0},
    ],
    ids=["default", "cost-threshold", "static", "least_load", "round_robin", "rollout"],
)
async def test_a_short_prompt_goes_to_the_pair(tiny_model_dir: Path, settings: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        sglang = await make_fleet(tiny_model_dir, stack, **settings)
        for stream in (False, True):
            status, answer, headers = await sglang.fleet.post({"prompt": SHORT, "max_tokens": 3, "stream": stream})
            assert (status, headers["x-kvbaton-decision"]) == (200, "remote"), answer
        assert len(sglang.servers["p0"].bodies) == len(sglang.servers["d0"].bodies) == 2


async def test_without_a_prefill_worker_the_error_says_so_at_once(sglang: SglangFleet) -> None:
    fleet, body = sglang.fleet, {"prompt": SHORT, "max_tokens": 3}
    assert (await fleet.post(body))[0] == 200
    await sglang.kill("p0")
    status, answer, _ = await fleet.post(body)  # the router has not heard of it yet
    assert (status, answer["error"]["code"]) == (502, "prefill_failed")
    await fleet.poll()
    status, answer, headers = await fleet.post(body)
    assert (status, answer["error"]["code"]) == (503, "no_workers") and headers["retry-after"]
    assert answer["error"]["message"] == "no prefill worker takes this prompt now, and the decode workers compute none"
    assert fleet.counter("kvbaton_router_queue_seconds_count") == 0, "nobody waited for room"


async def test_after_two_dead_prefill_servers_the_third_is_asked(tiny_model_dir: Path) -> None:
    """Elsewhere the prompt would be computed where it decodes by then."""
    roles: dict[str, Role] = {"p0": "prefill", "p1": "prefill", "p2": "prefill", "d0": "decode"}
    async with AsyncExitStack() as stack:
        sglang = await make_fleet(tiny_model_dir, stack, roles)
        await sglang.kill("p0")
        await sglang.kill("p1")
        for _ in range(3):  # whoever is asked first, and second
            status, answer, headers = await sglang.fleet.post({"prompt": SHORT, "max_tokens": 3})
            assert (status, headers["x-kvbaton-prefill"]) == (200, "p2"), answer


async def test_a_prefill_server_is_not_given_a_whole_request(sglang: SglangFleet) -> None:
    await sglang.kill("d0")
    await sglang.fleet.poll()
    status, answer, _ = await sglang.fleet.post({"prompt": SHORT, "max_tokens": 3})
    assert (status, answer["error"]["code"]) == (503, "no_workers")
    assert "no decode worker takes requests now" in answer["error"]["message"]
    assert not sglang.servers["p0"].bodies


async def test_a_slow_pair_is_waited_for_where_no_other_could_be_asked(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Giving up on the only prefill worker would leave a decode worker that cannot answer."""
    asked = asyncio.Event()

    class Watched(Registry):
        def another_answers(self, now_s: float, excluded: frozenset[str]) -> bool:
            asked.set()
            return super().another_answers(now_s, excluded)

    monkeypatch.setattr("router.fleet.Registry", Watched)
    async with AsyncExitStack() as stack:
        sglang = await make_fleet(tiny_model_dir, stack, first_token_min_s=0.01, first_token_factor=0.01)
        sglang.servers["p0"].hold.clear()
        post = asyncio.ensure_future(sglang.fleet.post({"prompt": SHORT, "max_tokens": 3, "stream": True}))
        await asked.wait()
        sglang.servers["p0"].hold.set()
        status, raw, _ = await post
        assert status == 200 and sse_events(raw)[-1] == "[DONE]"
        assert sglang.fleet.counter('kvbaton_router_retries_total{cause="slow_first_token"}') == 0


async def test_the_canary_probes_pairs_only(sglang: SglangFleet) -> None:
    fleet = sglang.fleet
    probes = list(Canary(fleet.registry, fleet.http, fleet.gateway._tokenizer, KEY, fleet.metrics)._probes())
    assert probes and all(probe.prefill is not None for probe in probes)
