"""A rolling change of the model's revision: a fleet has both for a while, under one name, and their KV never mixes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router.fleet import KEY, Fleet, running_fleet
from workers.scripted import serving

from kvbaton.config import MemberSettings, ModelSettings, WorkerSettings
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import Role
from kvbaton.workers.native import NativeWorker
from kvbaton.workers.process import make_worker
from kvbaton.workers.server import ServerOptions, WorkerServer

MakeModel = Callable[..., Path]
WORKERS: dict[str, Role] = {"p-old": "prefill", "d-old": "decode", "p-new": "prefill", "d-new": "decode"}


@dataclass
class Rolling:
    fleet: Fleet
    workers: dict[str, NativeWorker]
    urls: dict[str, str]

    async def tell(self, url: str, prompt: str, salt: str = "") -> tuple[str, Any]:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "cache_salt": salt}
        async with self.fleet.http.post(url + "/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer["choices"][0]["text"], response.headers

    def moved(self, name: str) -> int:
        stats = self.workers[name].stats()
        return stats.transfer_bytes_sent + stats.transfer_bytes_received


@asynccontextmanager
async def rolling(make_tiny_model: MakeModel, policy: str) -> AsyncIterator[Rolling]:
    async with AsyncExitStack() as stack:
        dirs = {"old": make_tiny_model("llama", seed=1), "new": make_tiny_model("llama", seed=2)}
        workers, members, urls = {}, [], {}
        for name, role in WORKERS.items():
            model = ModelSettings(dir=str(dirs[name[2:]]), name="tiny", dtype="float32", kv_blocks=64)
            worker = make_worker(model, WorkerSettings(role=role, chunk_tokens=64), KEY)
            await worker.start()
            stack.push_async_callback(worker.stop)
            app = WorkerServer(worker, ServerOptions(block_size=16, model_name="tiny", internal_key=KEY))
            urls[name] = await stack.enter_async_context(serving(app))
            workers[name] = worker
            members.append(MemberSettings(urls[name], role, name))
        settings: dict[str, Any] = {"threshold_tokens": 0, "policy": policy}
        fleet = await stack.enter_async_context(running_fleet(Tokenizer.load(dirs["old"]), {}, **settings))
        fleet.registry.set_members(members)
        await fleet.poll()
        yield Rolling(fleet, workers, urls)
        await fleet.settled()
        for worker in workers.values():
            await worker.check_empty()


@pytest.mark.parametrize("policy", ["static", "round_robin"])
async def test_two_revisions_in_one_fleet_never_mix_kv(make_tiny_model: MakeModel, policy: str) -> None:
    """Same name, same shapes, other weights. Every answer is the one that the decode worker's own revision gives, and
    bytes move only between workers of one revision; a pair of two is refused before a byte."""
    async with rolling(make_tiny_model, policy) as both:
        assert both.workers["p-old"].fingerprint != both.workers["p-new"].fingerprint
        prompts = [f"prompt number {number} of a rolling change, " * 3 for number in range(8)]
        expected = {}
        for name in ("d-old", "d-new"):
            for prompt in prompts:
                expected[name, prompt], _ = await both.tell(both.urls[name], prompt, "reference")
        assert all(expected["d-old", prompt] != expected["d-new", prompt] for prompt in prompts)
        for prompt in prompts:
            text, headers = await both.tell(both.fleet.url, prompt)
            decode, prefill = headers["x-kvbaton-decode"], headers.get("x-kvbaton-prefill")
            if decode.startswith("p"):  # nobody decodes where it was asked: a prefill worker did all of it
                decode = decode.replace("p-", "d-")
            assert text == expected[decode, prompt], (decode, prefill)
            assert prefill is None or prefill[2:] == decode[2:], "an answer across revisions"
            await both.fleet.poll()  # one that was left out for a refusal is asked again
        # Mixed pairs may be tried, since nothing keeps the router from it; not one of them may move a byte.
        sent = {name: worker.stats().transfer_bytes_sent for name, worker in both.workers.items()}
        received = {name: worker.stats().transfer_bytes_received for name, worker in both.workers.items()}
        for revision in ("old", "new"):
            assert sent[f"p-{revision}"] == received[f"d-{revision}"]
        assert sum(sent.values()) > 0


async def test_a_pair_of_two_revisions_is_refused_before_a_byte(make_tiny_model: MakeModel) -> None:
    """Told by its router to pull from the other revision, a decode worker does not."""
    async with rolling(make_tiny_model, "static") as both, aiohttp.ClientSession() as http:
        prefill = both.workers["p-new"]
        internal = {
            "request_id": "mixed", "prompt_token_ids": [list(range(3, 103))],
            "prefill": {"host": "127.0.0.1", "port": prefill.kv_port},
        }  # fmt: skip
        body = {"prompt": "x", "max_tokens": 4, "kvbaton": internal}
        headers = {"x-kvbaton-key": KEY}
        async with http.post(both.urls["d-old"] + "/v1/completions", json=body, headers=headers) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (502, "prefill_failed")
        assert both.moved("d-old") == both.moved("p-new") == 0
        assert prefill.stats().num_prompt_tokens == 0, "not even computed"
        internal["request_id"], internal["prefill"]["port"] = "alike", both.workers["p-old"].kv_port  # type: ignore[index]
        async with http.post(both.urls["d-old"] + "/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
        assert both.moved("d-old") > 0
