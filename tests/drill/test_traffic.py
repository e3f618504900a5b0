"""How each end of a request is told apart, against a real server that gives every kind of it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from router.fleet import KEY, running_fleet

from kvbaton.drill.fleet import of_router
from kvbaton.drill.samples import Sample
from kvbaton.drill.traffic import Prompt, Traffic, make_prompts
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.router.api_keys import ApiKeys, parse
from kvbaton.router.door import Door
from kvbaton.types import RemoteError

ANSWER = "one two three four"


class Server:
    """Answers ``/v1/completions`` in the way that ``how`` says."""

    def __init__(self) -> None:
        self.how = "right"
        self.salts: list[str] = []
        self.never = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.salts.append(body.get("cache_salt", ""))
        assert body["temperature"] == 0
        text = "one two threE four" if self.how == "wrong" else ANSWER
        if self.how == "refuse":
            error = {"message": "no room", "type": "server_error", "param": None, "code": "no_capacity"}
            return web.json_response({"error": error}, status=503)
        if self.how == "odd":
            return web.json_response({"detail": "not in OpenAI's shape"}, status=500)
        if self.how == "hang":
            await self.never.wait()
        usage = {"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 4}}
        if not body["stream"]:
            if self.how in ("cut", "unfinished"):
                assert request.transport is not None
                request.transport.abort()
            return web.json_response({"choices": [{"text": text, "finish_reason": "length"}], "usage": usage})
        response = web.StreamResponse(headers={"x-kvbaton-decode": "decode-7"})
        await response.prepare(request)
        words = text.split(" ")
        for number, word in enumerate(words):
            if number == 2 and self.how in ("cut", "unfinished", "break"):
                break
            last = number + 1 == len(words)
            part = {"text": word if number == 0 else " " + word, "finish_reason": "length" if last else None}
            await response.write(b"data: " + json.dumps({"choices": [part], "usage": None}).encode() + b"\n\n")
        if self.how == "break":
            error = {"message": "gone", "type": "server_error", "param": None, "code": "worker_error"}
            await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
        elif self.how == "cut":
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def traffic_to(server: Server, deadline_s: float = 60.0) -> AsyncIterator[Traffic]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    prompts = [Prompt("a", 4, ANSWER), Prompt("b", 4, ANSWER)]
    try:
        async with Traffic(f"http://127.0.0.1:{port}", prompts, time.monotonic, deadline_s) as traffic:
            yield traffic
    finally:
        server.never.set()
        await runner.cleanup()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("how", "whole", "streamed", "code"),
    [
        ("right", "right", "right", ""),
        ("wrong", "wrong", "wrong", ""),
        ("refuse", "error", "error", "no_capacity"),
        ("odd", "lost", "lost", ""),
        ("cut", "lost", "lost", ""),
        ("unfinished", "lost", "lost", ""),
    ],
)
async def test_every_end_has_its_name(how: str, whole: str, streamed: str, code: str, stream: bool) -> None:
    server = Server()
    server.how = how
    async with traffic_to(server) as traffic:
        sample = await traffic.send("canary", 0, stream)
    assert (sample.outcome, sample.code) == (streamed if stream else whole, code), sample
    assert sample.uncached_tokens == (16 if sample.outcome in ("right", "wrong") else 0)


async def test_a_stream_that_ends_with_an_error_event_was_answered_unless_its_text_is_wrong() -> None:
    server = Server()
    server.how = "break"
    heard: list[tuple[int, str]] = []
    async with traffic_to(server) as traffic:
        sample = await traffic.send(
            "trigger", 1, True, on_part=lambda number, headers: heard.append((number, headers["x-kvbaton-decode"]))
        )
        assert (sample.outcome, sample.code, sample.begun, sample.decode) == ("error", "worker_error", True, "decode-7")
        assert heard == [(1, "decode-7"), (2, "decode-7")]
        traffic.prompts[1] = Prompt("b", 4, "one Two three four")
        assert (await traffic.send("trigger", 1, True)).outcome == "wrong", "the part that came is not its beginning"


async def test_what_does_not_end_is_lost_at_its_deadline() -> None:
    server = Server()
    server.how = "hang"
    async with traffic_to(server, deadline_s=0.05) as traffic:
        sample = await traffic.send("background", 1, True)
    assert (sample.outcome, sample.message) == ("lost", "no end within 0.05 s")


async def test_answers_are_learnt_twice_and_doubts_are_told() -> None:
    server = Server()
    async with traffic_to(server) as traffic:
        assert await traffic.learn() == []
        assert [prompt.answer for prompt in traffic.prompts] == [ANSWER, ANSWER]
        traffic.prompts = [Prompt("a", 4)]
        flips = iter(("right", "wrong"))
        asked = server.answer

        async def flipping(request: web.Request) -> web.StreamResponse:
            server.how = next(flips)
            return await asked(request)

        server.answer = flipping  # type: ignore[method-assign]
    async with traffic_to(server) as traffic:
        traffic.prompts = [Prompt("a", 4)]
        assert len(await traffic.learn()) == 1
    server = Server()
    server.how = "refuse"
    async with traffic_to(server) as traffic:
        with pytest.raises(RemoteError, match="healthy"):
            await traffic.learn()


async def test_the_flow_sends_canaries_and_background_and_ends_whole() -> None:
    server = Server()
    async with traffic_to(server) as traffic:
        traffic.begin(random.Random(1), rate_per_s=200.0)
        async with asyncio.timeout(60):
            while len({sample.kind for sample in traffic.samples}) < 2:  # noqa: ASYNC110 (it ends, it tells nobody)
                await asyncio.sleep(0.005)
        await traffic.end()
        samples: list[Sample] = traffic.samples
        assert traffic.open_since_s() == [] and all(sample.outcome == "right" for sample in samples)
        assert len(set(server.salts)) == len(server.salts) == len(samples), "no prompt is known to any cache"
        assert {sample.prompt for sample in samples if sample.kind == "canary"} == {0}


def test_prompts_are_those_of_their_seed() -> None:
    one, same, other = make_prompts(1, 10, 600, 32), make_prompts(1, 10, 600, 32), make_prompts(2, 10, 600, 32)
    assert one == same and one != other
    assert max(len(prompt.text) for prompt in one) <= 600 < 3 * min(len(prompt.text) for prompt in one) * 10
    assert all(8 <= prompt.max_tokens <= 32 for prompt in one)


async def test_a_router_that_asks_for_keys_is_drilled_with_one(tiny_model_dir: Path) -> None:
    """What it tells of its model, the recorded answers and the traffic all need it."""
    key = "alice-key-0123456789"
    async with running_fleet(Tokenizer.load(tiny_model_dir), {"b0": "both"}) as served:
        served.gateway.door = Door(ApiKeys(parse(f"alice {key}\n", "a file")), KEY.encode())
        target = of_router(served.url, None, served.urls, KEY)
        with pytest.raises(RemoteError, match="lists no model"):
            await target.max_context()
        target.api_key = key
        prompts = [Prompt("a b c", 4)]
        async with Traffic(served.url, prompts, time.monotonic, 60.0) as traffic:
            with pytest.raises(RemoteError, match="401"):
                await traffic.learn()
        assert await target.max_context() > 0 and await target.page() is not None
        async with Traffic(served.url, prompts, time.monotonic, 60.0, target.client_headers) as traffic:
            assert await traffic.learn() == []
            assert (await traffic.send("canary", 0, stream=True)).outcome == "right"
