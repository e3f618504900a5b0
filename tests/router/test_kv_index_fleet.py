"""The prefix index of a live router over real workers: prompts go where their prefix is, and it follows the caches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from router.fleet import KEY, Fleet, running_fleet
from workers.scripted import ScriptedWorker, serving, until

from kvbaton.config import MemberSettings, ModelSettings, WorkerSettings
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.router.kv_follow import KVFollower
from kvbaton.router.prefix_index import PromptChains
from kvbaton.workers.native import NativeWorker
from kvbaton.workers.process import make_worker
from kvbaton.workers.server import ServerOptions, WorkerServer

NUM_BLOCKS = 24


class Address:
    """Where a worker answers, whichever life of it; and a way to break only its KV events."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.events_broken = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.events_broken and scope["path"].startswith("/internal/kv-"):
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, send)


class KVFleet:
    def __init__(self, fleet: Fleet, stack: AsyncExitStack, model_dir: Path) -> None:
        self.fleet, self._stack, self._model_dir = fleet, stack, model_dir
        self.workers: dict[str, NativeWorker] = {}
        self.addresses: dict[str, Address] = {}
        self.followers: dict[str, KVFollower] = {}

    async def start_worker(self, name: str) -> None:
        model = ModelSettings(dir=str(self._model_dir), name="tiny", dtype="float32", kv_blocks=NUM_BLOCKS)
        worker = make_worker(model, WorkerSettings(role="both", chunk_tokens=64))
        await worker.start()
        self._stack.push_async_callback(worker.stop)
        self.workers[name] = worker
        app = WorkerServer(worker, ServerOptions(block_size=16, model_name="tiny", internal_key=KEY))
        if name in self.addresses:
            self.addresses[name].app = app
        else:
            self.addresses[name] = Address(app)

    async def follow(self) -> None:
        """Until the index knows all that the workers have said so far."""
        await self.fleet.settled()
        await self.fleet.poll()
        for member in self.fleet.registry.members:
            follower = self.followers.setdefault(member.name, self.fleet.monitor.follower(member))
            for _ in range(3):  # a snapshot, and what followed it
                await follower.round(wait_s=0.0)

    async def ask(self, prompt: list[int], max_tokens: int = 4) -> tuple[str, int]:
        """Who answered, and how many prompt tokens its cache had."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        status, answer, headers = await self.fleet.post(body)
        assert status == 200, answer
        return headers["x-kvbaton-decode"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def known(self, name: str) -> dict[str, Any]:
        """As ``GET /fleet`` says it."""
        members: Any = self.fleet.gateway.fleet()["members"]
        return next(member["prefix_index"] for member in members if member["name"] == name)

    def check(self) -> None:
        """The index is what the workers' caches are."""
        for name, worker in self.workers.items():
            held = self.fleet.monitor._index.exact.held(name)
            assert held == set(worker.engine.cached_hashes()), name


@pytest.fixture
async def kv(tiny_model_dir: Path) -> AsyncIterator[KVFleet]:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(Tokenizer.load(tiny_model_dir), {}))
        kv = KVFleet(fleet, stack, tiny_model_dir)
        members = []
        for name in ("b0", "b1"):
            await kv.start_worker(name)
            url = await stack.enter_async_context(serving(kv.addresses[name]))
            members.append(MemberSettings(url, "both", name))
        fleet.registry.set_members(members)
        await kv.follow()
        yield kv


def prompt(seed: int, num_tokens: int = 100) -> list[int]:
    return [seed + 1] * num_tokens


async def test_a_prompt_goes_where_its_prefix_is_and_finds_it(kv: KVFleet) -> None:
    """RT-14 too: the same tokens, given as ids, share the index."""
    first, cached = await kv.ask(prompt(1))
    assert cached == 0
    await kv.follow()
    kv.check()
    assert kv.known(first) == {"trust": "fresh", "num_blocks": 6}
    for number in range(4):
        again, cached = await kv.ask(prompt(1))
        assert (again, cached) == (first, 96)
        longer, cached = await kv.ask([*prompt(1), *prompt(number + 9, 30)])
        assert (longer, cached) == (first, 96)
    await kv.fleet.settled()
    fleet = kv.fleet
    assert fleet.counter("kvbaton_router_foretold_cached_tokens_total") == 8 * 96
    assert fleet.counter("kvbaton_router_cached_tokens_total") == 8 * 96
    assert fleet.counter('kvbaton_router_prefix_error_tokens_bucket{le="0.0"}') == 9, "foretold exactly, each time"
    assert fleet.counter(f'kvbaton_router_kv_events_total{{kind="stored",member="{first}"}}') == 6
    assert fleet.counter("kvbaton_router_kv_lag_seconds_count") > 0


async def test_an_eviction_is_seen(kv: KVFleet) -> None:
    """RT-12: foretold and found agree under eviction pressure."""
    for seed in range(12):
        await kv.ask(prompt(seed))
    await kv.follow()
    kv.check()
    before = kv.fleet.counter("kvbaton_router_prefix_error_tokens_sum")
    assert before == 0
    for seed in range(12):
        await kv.ask(prompt(seed))
        await kv.follow()
        kv.check()
    removed = [kv.fleet.counter(f'kvbaton_router_kv_events_total{{kind="removed",member="{n}"}}') for n in kv.workers]
    assert sum(removed) > 0, "the caches are too small for all of them"
    assert kv.fleet.counter("kvbaton_router_prefix_error_tokens_sum") == 0


async def test_a_restart_is_forgotten_and_learned_anew(kv: KVFleet) -> None:
    """RT-12: nothing that died with a worker is foretold of its next life."""
    first, _ = await kv.ask(prompt(1))
    await kv.follow()
    assert kv.known(first)["num_blocks"] == 6
    await kv.start_worker(first)
    await kv.fleet.poll()
    assert kv.known(first)["num_blocks"] == 0
    assert kv.fleet.counter(f'kvbaton_router_member_restarts_total{{member="{first}"}}') == 1
    await kv.follow()
    assert kv.known(first) == {"trust": "fresh", "num_blocks": 0}
    for _ in range(2):
        await kv.ask(prompt(1))
        await kv.follow()
        kv.check()
    assert kv.fleet.counter("kvbaton_router_prefix_error_tokens_sum") == 0


async def test_a_cleared_cache_and_a_full_ring_are_caught_up(kv: KVFleet) -> None:
    first, _ = await kv.ask(prompt(1))
    await kv.follow()
    worker = kv.workers[first]
    worker.kv_events._max_hashes = 1  # from now on every batch falls out of the ring at once
    await asyncio.wrap_future(worker.engine.call(type(worker.engine).clear_cache))
    await kv.ask(prompt(2))
    await kv.ask(prompt(3))
    await kv.follow()
    kv.check()
    name = f'{{member="{first}"}}'
    assert kv.fleet.counter("kvbaton_router_kv_gaps_total" + name) == 1
    assert kv.fleet.counter("kvbaton_router_kv_resyncs_total" + name) == 1


async def test_without_events_prompts_still_go_where_they_went_before(kv: KVFleet) -> None:
    """RT-06: the event channel is broken while the workers are healthy."""
    first, _ = await kv.ask(prompt(1))
    await kv.follow()
    for address in kv.addresses.values():
        address.events_broken = True
    await kv.follow()
    assert kv.known(first) == {"trust": "stale", "num_blocks": 6}
    assert await kv.ask(prompt(1)) == (first, 96), "what was known stays of use"
    second, _ = await kv.ask(prompt(2))
    for _ in range(3):
        assert await kv.ask(prompt(2)) == (second, 96), "what is sent there counts"
    await kv.fleet.settled()
    metrics = kv.fleet
    assert metrics.counter(f'kvbaton_router_kv_failures_total{{member="{first}"}}') >= 2
    metrics.registry.export()
    assert metrics.counter(f'kvbaton_router_kv_fresh{{member="{first}"}}') == 0
    for address in kv.addresses.values():
        address.events_broken = False
    await kv.follow()
    kv.check()
    assert kv.known(first)["trust"] == "fresh"


async def test_a_worker_that_sends_no_events_is_known_by_what_was_sent_there(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model_dir)
    async with running_fleet(tokenizer, {"b0": "both", "b1": "both"}) as fleet:
        posts = [await fleet.post({"prompt": prompt(1), "max_tokens": 2}) for _ in range(3)]
        assert len({headers["x-kvbaton-decode"] for _, _, headers in posts}) == 1
        member = fleet.registry.members[0]
        assert await fleet.monitor.follower(member).round() == fleet.monitor._settings.poll_interval_s
        assert fleet.registry.prefix_index_state(member)["trust"] == "approximate"


async def test_what_is_under_way_is_expected_and_no_longer(tiny_model_dir: Path) -> None:
    """A second request with the same prefix is told of the first one's blocks before any event came."""
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(Tokenizer.load(tiny_model_dir), {"b0": "both"}))
        index, worker = fleet.monitor._index, fleet.workers["b0"]
        index.forget("b0")
        index.heard_of("b0", "b0-1", 16, True, 1000)
        index.exact.end_round("b0", 0)
        worker.gate.clear()
        post = asyncio.ensure_future(fleet.post({"prompt": prompt(1)}))
        await until(lambda: worker.num_open == 1)
        chains = PromptChains([prompt(1)])
        assert fleet.registry.cached_tokens(chains) == {"b0": 96}
        worker.gate.set()
        await post
        await fleet.settled()
        index.exact.end_round("b0", index.exact.begin_round("b0"))
        assert fleet.registry.cached_tokens(chains) == {"b0": 0}, "no event ever spoke of it"


async def test_the_monitor_follows_by_itself(kv: KVFleet) -> None:
    watching = asyncio.ensure_future(kv.fleet.monitor.run())
    try:
        first, _ = await kv.ask(prompt(1))
        await until(lambda: kv.known(first)["num_blocks"] == 6)
        kv.fleet.registry.set_members([m.settings for m in kv.fleet.registry.members if m.name != first])
        await until(lambda: not kv.fleet.monitor._index.exact.knows(first))
        kv.fleet.registry.export()
        assert f'member="{first}"' not in kv.fleet.metrics.exposition().decode().split("kvbaton_router_kv_fresh")[-1]
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def test_scripted_workers_say_nothing(tiny_model_dir: Path) -> None:
    worker = ScriptedWorker(Tokenizer.load(tiny_model_dir))
    assert not WorkerServer(worker, ServerOptions(block_size=16, internal_key=KEY)).info().kv_events
