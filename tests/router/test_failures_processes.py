"""Real processes and kill -9: nobody says goodbye, sockets are reset by the kernel, shared memory stays behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router.processes import KEY, ProcessFleet
from router.rig import BRISK, native_worker, read_stream, serve, stream

from kvbaton.kv.shared_pool import sweep_stale

PROMPT = "the quick brown fox and the lazy dog, " * 6


@pytest.fixture(scope="module")
def processes(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    fleet = ProcessFleet(tiny_model_dir, tmp_path_factory.mktemp("fleet"))
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.end()
        sweep_stale()


class Client:
    def __init__(self, fleet: ProcessFleet, reference_url: str, http: aiohttp.ClientSession) -> None:
        self.fleet, self.reference_url, self.http = fleet, reference_url, http

    async def ask(self, body: dict[str, Any]) -> Any:
        return await stream(self.http, self.fleet.router.url, body)

    async def expected(self, body: dict[str, Any]) -> Any:
        return await stream(self.http, self.reference_url, body)

    async def stats(self, name: str) -> dict[str, Any]:
        url = f"{self.fleet.workers[name].url}/internal/info"
        async with self.http.get(url, headers={"x-kvbaton-key": KEY}) as response:
            return (await response.json())["stats"]

    async def until_empty(self) -> None:
        """No request, block, pin or lease on any worker."""
        async with asyncio.timeout(60):
            for name, process in self.fleet.workers.items():
                while process.popen is not None:
                    stats = await self.stats(name)
                    if not any(stats[k] for k in ("num_active", "num_blocks_used", "num_blocks_pinned", "num_leases")):
                        break
                    await asyncio.sleep(0.02)

    async def until_seen(self, states: dict[str, str]) -> None:
        """The router sees its members so."""
        async with asyncio.timeout(60):
            while True:
                try:
                    async with self.http.get(self.fleet.router.url + "/fleet") as response:
                        members = {m["name"]: m for m in (await response.json())["members"]}
                    named = all(members[name]["state"] == state for name, state in states.items())
                    lives = {name: self.fleet.workers[name].incarnation for name, s in states.items() if s == "up"}
                    if named and all(members[name]["incarnation"] == life for name, life in lives.items()):
                        return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.02)


@pytest.fixture
async def client(processes: ProcessFleet, tiny_model_dir: Path) -> AsyncIterator[Client]:
    async with AsyncExitStack() as stack:
        _, url = await serve(stack, native_worker(tiny_model_dir, "both", BRISK))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        client = Client(processes, url, http)
        await client.until_seen(dict.fromkeys(processes.workers, "up"))
        yield client
        await client.until_empty()


def bodies(count: int, tag: str, max_tokens: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{tag} {i} {PROMPT}", "temperature": 1, "seed": i, "max_tokens": max_tokens, "ignore_eos": True}
        for i in range(count)
    ]


async def test_cases_fl_03_and_fl_16_prefill_is_killed_and_comes_back(client: Client) -> None:
    """FL-16: killed while it holds several requests, all of which end well. FL-03: restarted at the same address, it
    serves again, and the decode workers are the same processes as before."""
    prefill, asked = client.fleet.workers["p0"], bodies(6, "killed", 10)
    expected = [await client.expected(body) for body in asked]
    pids = [client.fleet.workers[name].pid for name in ("d0", "d1")]
    assert (await client.ask({"prompt": PROMPT, "max_tokens": 2})).headers["x-kvbaton-decision"] == "remote"
    old = prefill.incarnation
    kv_port = await kv_port_of(client, "p0")
    prefill.stop_running()  # so that it certainly holds them all, in the middle
    asking = [asyncio.ensure_future(client.ask(body)) for body in asked]
    async with asyncio.timeout(60):
        while sum([(await client.stats(name))["num_active"] for name in ("d0", "d1")]) < len(asked):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    prefill.kill()
    for told, want in zip(await asyncio.gather(*asking), expected, strict=True):
        assert told.answer == want.answer
        assert told.headers["x-kvbaton-decision"].startswith("fallback_")
    await client.until_empty()
    if "--kv-port" not in prefill.arguments:
        prefill.arguments += ["--kv-port", str(kv_port)]
    prefill.start()
    assert prefill.incarnation != old
    await client.until_seen({"p0": "up"})
    for body, want in zip(bodies(5, "killed", 10), expected, strict=False):
        told = await client.ask({**body, "prompt": "again " + body["prompt"]})
        assert told.headers["x-kvbaton-decision"] == "remote" and told.done
        assert (await client.ask(body)).answer == want.answer
    assert pids == [client.fleet.workers[name].pid for name in ("d0", "d1")]
    assert all(client.fleet.workers[name].popen.poll() is None for name in ("d0", "d1"))  # type: ignore[union-attr]


async def kv_port_of(client: Client, name: str) -> int:
    url = f"{client.fleet.workers[name].url}/internal/info"
    async with client.http.get(url, headers={"x-kvbaton-key": KEY}) as response:
        return int((await response.json())["kv_port"])


async def killed_at_its_first_token(client: Client, asked: list[dict[str, Any]]) -> list[Any]:
    """What clients of streams were told whose decode worker, d0, ended when the first of them had heard of it."""
    decode = client.fleet.workers["d0"]

    async def follow(body: dict[str, Any]) -> Any:
        raw, payload = b"", {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with client.http.post(client.fleet.router.url + "/v1/completions", json=payload) as response:
            async for part in response.content.iter_any():
                if response.headers["x-kvbaton-decode"] == "d0":
                    decode.kill()
                raw += part
            return read_stream(raw, response.status, response.headers)

    return await asyncio.gather(*(follow(body) for body in asked))


async def test_decode_is_killed_in_the_middle_of_streams_and_comes_back(client: Client) -> None:
    """Its streams had hundreds of tokens to go. Again, should it have sent them all before it was killed."""
    asked = bodies(6, "stream", 250)
    expected = [await client.expected(body) for body in asked]
    before = await counter(client, "kvbaton_router_replays_total")
    for _ in range(10):
        for told, want in zip(await killed_at_its_first_token(client, asked), expected, strict=True):
            assert told.answer == want.answer
            assert len(told.ids) == 1
        client.fleet.workers["d0"].kill()  # should none have gone there
        await client.until_empty()
        client.fleet.workers["d0"].start()
        await client.until_seen({"d0": "up", "d1": "up"})
        if await counter(client, "kvbaton_router_replays_total") > before:
            break
    assert await counter(client, "kvbaton_router_replays_total") > before
    assert (await client.ask(asked[0])).answer == expected[0].answer


async def counter(client: Client, name: str) -> float:
    async with client.http.get(client.fleet.router.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{")))


async def test_case_lk_13_the_router_is_killed_and_started_again(client: Client) -> None:
    """LK-13: nobody is left to cancel what it had under way. Workers see the dead connections and free everything;
    clients see theirs end without an end mark; a new router needs nothing but its fleet file."""
    router, asked = client.fleet.router, bodies(4, "orphan", 250)

    async def follow(body: dict[str, Any]) -> bytes:
        got = b""
        try:
            payload = {**body, "stream": True}
            async with client.http.post(router.url + "/v1/completions", json=payload) as response:
                async for part in response.content.iter_any():
                    router.kill()
                    got += part
        except aiohttp.ClientError:
            got += b"BROKEN"
        return got

    for _ in range(10):  # again, should all of it have been on its way when the first of it came
        raws = await asyncio.gather(*(follow(body) for body in asked))
        for raw in raws:
            whole = raw.removesuffix(b"BROKEN")
            assert whole != raw or b"data: [DONE]" in raw, "a client can tell that it is not the end"
            events = whole[: whole.rfind(b"\n\n")].split(b"\n\n") if b"\n\n" in whole else []
            assert all(json.loads(e[6:])["choices"] for e in events if e and e != b"data: [DONE]")
        await client.until_empty()  # long before any lease
        router.start()
        await client.until_seen(dict.fromkeys(client.fleet.workers, "up"))
        if any(raw.endswith(b"BROKEN") for raw in raws):
            break
    assert any(raw.endswith(b"BROKEN") for raw in raws)
    body = asked[0]
    assert (await client.ask(body)).answer == (await client.expected(body)).answer
