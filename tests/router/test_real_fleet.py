"""The whole service with real engines: a split fleet says what a single worker says, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from router.fleet import KEY, Fleet, running_fleet
from router.gates import until_empty
from workers.scripted import serving, sse_events, until

from kvbaton.config import MemberSettings, ModelSettings, WorkerSettings
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import Role
from kvbaton.workers.native import NativeWorker
from kvbaton.workers.process import make_worker
from kvbaton.workers.server import ServerOptions, WorkerServer

PROMPT = "the quick brown fox and the lazy dog, "


class RealFleet:
    def __init__(self, fleet: Fleet, workers: dict[str, NativeWorker]) -> None:
        self.fleet = fleet
        self.workers = workers

    async def ask(self, path: str = "/v1/completions", **body: Any) -> Any:
        status, answer, headers = await self.fleet.post(body, path)
        assert status == 200, answer
        expected = "remote" if len(self.workers) > 1 else "local_colocated"
        assert headers["x-kvbaton-decision"] in (expected, "local_cached")
        return answer

    async def check_empty(self) -> None:
        await self.fleet.settled()
        for worker in self.workers.values():
            await until_empty(worker)


@asynccontextmanager
async def real_fleet(model_dir: Path, roles: dict[str, Role], **settings: Any) -> AsyncIterator[RealFleet]:
    """Always split, unless ``settings`` of the router say otherwise."""
    async with AsyncExitStack() as stack:
        workers, members = {}, []
        for name, role in roles.items():
            model = ModelSettings(dir=str(model_dir), name="tiny", dtype="float32", kv_blocks=128)
            worker = make_worker(model, WorkerSettings(role=role, chunk_tokens=64))
            await worker.start()
            stack.push_async_callback(worker.stop)
            app = WorkerServer(worker, ServerOptions(block_size=16, model_name="tiny", internal_key=KEY))
            url = await stack.enter_async_context(serving(app))
            workers[name] = worker
            members.append(MemberSettings(url, role, name))
        fleet = await stack.enter_async_context(
            running_fleet(Tokenizer.load(model_dir), {}, **{"threshold_tokens": 0, **settings})
        )
        fleet.registry.set_members(members)
        await fleet.poll()
        real = RealFleet(fleet, workers)
        yield real
        await real.check_empty()


@pytest.fixture
async def split(tiny_model_dir: Path) -> AsyncIterator[RealFleet]:
    async with real_fleet(tiny_model_dir, {"p0": "prefill", "d0": "decode"}) as fleet:
        yield fleet


@pytest.fixture
async def single(tiny_model_dir: Path) -> AsyncIterator[RealFleet]:
    async with real_fleet(tiny_model_dir, {"b0": "both"}) as fleet:
        yield fleet


REQUESTS: list[dict[str, Any]] = [
    {"prompt": PROMPT, "temperature": 0},
    {"prompt": PROMPT * 6, "temperature": 0, "max_tokens": 40},
    {"prompt": PROMPT, "temperature": 1, "seed": 7, "max_tokens": 32},
    {"prompt": PROMPT, "temperature": 1, "seed": 1, "n": 4},
    {"prompt": [PROMPT, "another", "third " * 20], "temperature": 1, "seed": 3, "n": 2, "max_tokens": 5},
    {"prompt": [[1, 2, 3], [4] * 70], "temperature": 0},
    {"prompt": PROMPT, "temperature": 0, "logprobs": 3, "max_tokens": 8},
    {"prompt": PROMPT, "temperature": 0, "max_tokens": 1, "logprobs": 1},
    {"prompt": PROMPT, "temperature": 0, "max_tokens": 50, "min_tokens": 20},
    {"prompt": PROMPT, "temperature": 0.8, "seed": 2, "presence_penalty": 1, "repetition_penalty": 1.3, "top_k": 20},
    {"prompt": "x", "temperature": 0, "logit_bias": {"65": 100}, "max_tokens": 3},
    {"prompt": PROMPT, "temperature": 0, "logit_bias": {"258": 100}},  # the first token is the end
    {"prompt": PROMPT, "temperature": 0, "logit_bias": {"65": 100}, "stop_token_ids": [65]},
    {"prompt": PROMPT, "temperature": 0, "logit_bias": {"65": 100}, "stop": "a" * 3, "max_tokens": 9},
]


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    usage = {key: value for key, value in answer["usage"].items() if key != "prompt_tokens_details"}
    return {"choices": answer["choices"], "usage": usage}


async def test_a_split_fleet_says_what_one_worker_says(split: RealFleet, single: RealFleet) -> None:
    """AP-06: logprobs of the first token, which prefill samples, are among what is compared."""
    for request in REQUESTS:
        expected, actual = await single.ask(**request), await split.ask(**request)
        assert without_ids(actual) == without_ids(expected), request
        num_prompts = len(request["prompt"]) if isinstance(request["prompt"], list) else 1
        assert [c["index"] for c in actual["choices"]] == list(range(num_prompts * request.get("n", 1)))
        raw = await split.ask(**request, stream=True, stream_options={"include_usage": True})
        events = [json.loads(event) for event in sse_events(raw)[:-1]]
        for choice in actual["choices"]:
            parts = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"], request
            assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [choice["finish_reason"]]
            if choice["logprobs"]:
                assert sum((p["logprobs"]["tokens"] for p in parts), []) == choice["logprobs"]["tokens"]
        assert events[-1]["usage"]["completion_tokens"] == actual["usage"]["completion_tokens"]
    await split.check_empty()
    assert split.fleet.counter("kvbaton_router_disaggregated_requests_total") > 10


async def test_first_token_ends(split: RealFleet) -> None:
    """AP-01: stop token, stop string and length at the first token are answered without a decode step."""
    for extra, reason, num_tokens in (
        ({"logit_bias": {"258": 100}}, "stop", 1),
        ({"logit_bias": {"65": 100}, "stop_token_ids": [65]}, "stop", 1),
        ({"logit_bias": {"65": 100}, "stop": ["b"]}, "stop", 1),
        ({"max_tokens": 1}, "length", 1),
    ):
        tokenizer = split.workers["d0"].tokenizer
        if "stop" in extra:
            extra = {**extra, "stop": [tokenizer.decode([65])]}
        answer = await split.ask(prompt=PROMPT, temperature=0, **extra)
        assert answer["choices"][0]["finish_reason"] == reason
        assert answer["usage"]["completion_tokens"] == num_tokens
    await split.check_empty()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_letters", [1, 3])
async def test_a_stop_string_hides_no_transfer(split: RealFleet, stream: bool, num_letters: int) -> None:
    """Log and counters say what was moved, whether the text ends in the middle or while KV is still on its way."""
    decode = split.workers["d0"]
    stop = decode.tokenizer.decode([65]) * num_letters
    for i in range(4):
        before = decode.stats().transfer_bytes_received
        prompt = f"{i}{PROMPT * 6}"
        await split.ask(prompt=prompt, temperature=0, logit_bias={"65": 100}, stop=stop, max_tokens=20, stream=stream)
        await split.check_empty()
        received = decode.stats().transfer_bytes_received
        assert split.fleet.counter("kvbaton_router_transfer_bytes_total") == received
        if num_letters > 1:  # a decode step was made, so all of the prompt is here
            blocks = decode.layout.blocks_for(len(decode.tokenizer.encode(prompt)))
            assert received - before == blocks * decode.layout.block_bytes


async def test_cached_tokens_are_the_prefill_sides_own(split: RealFleet) -> None:
    """AP-11"""
    prompt = "a cold prompt of many tokens, " * 8
    cached = []
    for suffix in ("", ""):
        answer = await split.ask(prompt=prompt + suffix, max_tokens=2, temperature=0)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    num_prompt = answer["usage"]["prompt_tokens"]
    assert cached[0] == 0 and 0 < cached[1] < num_prompt and cached[1] % 16 == 0


@pytest.mark.parametrize("after_bytes", [0, 1])
async def test_clients_that_go_away_leave_nothing_on_either_side(split: RealFleet, after_bytes: int) -> None:
    host, port = split.fleet.url.removeprefix("http://").split(":")
    writers = []
    for i in range(12):
        body = json.dumps({"prompt": f"{i} " + PROMPT * 6, "max_tokens": 150, "ignore_eos": True, "stream": True})
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        if after_bytes:
            await reader.read(after_bytes)
        writers.append(writer)
    if not after_bytes:
        await until(lambda: split.fleet.gateway.open.num > 0)
    for writer in writers:
        writer.close()
    await split.check_empty()
    assert (await split.ask(prompt=PROMPT, temperature=0))["choices"][0]["text"]


async def test_a_burst_of_many_shapes_at_once(split: RealFleet, single: RealFleet) -> None:
    """Everything at the same time gives what everything alone gives."""
    seeded = [request for request in REQUESTS if request["temperature"] == 0 or "seed" in request]
    alone = [await single.ask(**request) for request in seeded]
    together = await asyncio.gather(*(split.ask(**request) for request in seeded * 2))
    for expected, actual in zip(alone * 2, together, strict=True):
        assert without_ids(actual) == without_ids(expected)
