"""Another role for a worker while it runs, over a real socket: what is open ends first, or nothing changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from workers.scripted import ScriptedWorker, serving, until

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import Role
from kvbaton.workers.server import ServerOptions, WorkerServer

KEY = "k" * 20


class Stubborn(ScriptedWorker):
    """Peers still read from it, whatever the deadline."""

    async def switch_role(self, role: Role, deadline_s: float) -> bool:
        return False


@dataclass
class Served:
    worker: ScriptedWorker
    server: WorkerServer
    url: str
    http: aiohttp.ClientSession

    async def call(self, path: str, body: Any, key: str = KEY) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=data, headers={"x-kvbaton-key": key}) as response:
            return response.status, await response.json()

    async def ask(self) -> tuple[int, Any]:
        return await self.call("/v1/completions", {"prompt": "hello"})


@asynccontextmanager
async def served(worker: ScriptedWorker) -> AsyncIterator[Served]:
    server = WorkerServer(worker, ServerOptions(block_size=16, internal_key=KEY))
    async with serving(server) as url, aiohttp.ClientSession() as http:
        yield Served(worker, server, url, http)
    assert server.open.num == 0


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


async def test_a_role_is_changed_in_the_same_life_and_told_with_a_count(tokenizer: Tokenizer) -> None:
    async with served(ScriptedWorker(tokenizer, "decode", life="one")) as it:
        for number, role in enumerate(("prefill", "both", "decode"), 1):
            status, info = await it.call("/internal/role", {"role": role, "deadline_s": 5})
            assert status == 200
            assert (info["role"], info["role_changes"], info["incarnation"]) == (role, number, "one")
            assert info["state"] == "serving" and info["pid"] > 0
        status, info = await it.call("/internal/role", {"role": "decode"})
        assert (status, info["role_changes"]) == (200, 3), "it is that already"
        text = it.server.metrics.exposition().decode()
        assert 'kvbaton_worker_running_requests{role="decode"}' in text and 'requests{role="both"} 0' not in text


async def test_open_requests_end_first_and_new_ones_go_elsewhere_meanwhile(tokenizer: Tokenizer) -> None:
    async with served(ScriptedWorker(tokenizer, "decode")) as it:
        it.worker.gate.clear()
        asking = asyncio.ensure_future(it.ask())
        await until(lambda: it.worker.num_open == 1)
        changing = asyncio.ensure_future(it.call("/internal/role", {"role": "prefill", "deadline_s": 60}))
        await until(lambda: it.server.state == "switching")
        status, answer = await it.ask()
        assert (status, answer["error"]["code"]) == (503, "draining"), "what the router sends to another worker"
        status, answer = await it.call("/internal/role", {"role": "both"})
        assert (status, answer["error"]["code"]) == (409, "not_serving"), "one change at a time"
        assert it.worker.role == "decode"
        it.worker.gate.set()
        assert (await asking)[0] == 200 and (await changing)[1]["role"] == "prefill"
        assert (await it.ask())[0] == 200


@pytest.mark.parametrize("kind", [ScriptedWorker, Stubborn])
async def test_what_does_not_end_in_time_leaves_the_worker_as_it_was(
    tokenizer: Tokenizer, kind: type[ScriptedWorker]
) -> None:
    async with served(kind(tokenizer, "prefill")) as it:
        if kind is ScriptedWorker:
            it.worker.gate.clear()
            asking = asyncio.ensure_future(it.ask())
            await until(lambda: it.worker.num_open == 1)
        status, answer = await it.call("/internal/role", {"role": "decode", "deadline_s": 0})
        assert (status, answer["error"]["code"]) == (409, "still_busy") and "prefill as before" in answer["error"][
            "message"
        ]
        assert (it.server.state, it.worker.role, it.server.role_changes) == ("serving", "prefill", 0)
        if kind is ScriptedWorker:
            it.worker.gate.set()
            assert (await asking)[0] == 200, "nothing was cut off"


async def test_a_drain_that_begins_meanwhile_wins(tokenizer: Tokenizer) -> None:
    async with served(ScriptedWorker(tokenizer, "decode")) as it:
        it.worker.gate.clear()
        asking = asyncio.ensure_future(it.ask())
        await until(lambda: it.worker.num_open == 1)
        changing = asyncio.ensure_future(it.call("/internal/role", {"role": "prefill", "deadline_s": 60}))
        await until(lambda: it.server.state == "switching")
        assert (await it.call("/internal/drain", {"deadline_s": 3.5}))[0] == 202
        it.worker.gate.set()
        await asking
        await changing
        assert it.server.state == "draining" and it.server.drain_deadline_s == 3.5 and it.worker.role == "decode"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/internal/role", b"{}"),
        ("/internal/role", b'{"role": "wizard"}'),
        ("/internal/role", b'{"role": "both", "when": "now"}'),
        ("/internal/role", b"not json"),
        ("/internal/drain", b'{"deadline_s": "soon"}'),
    ],
)
async def test_nonsense_is_a_400_and_without_the_key_nothing_is_done(
    tokenizer: Tokenizer, path: str, body: bytes
) -> None:
    """SE-10: nobody without the fleet's key changes it."""
    async with served(ScriptedWorker(tokenizer, "decode")) as it:
        assert (await it.call(path, body))[0] == 400
        assert (await it.call(path, b'{"role": "prefill"}', key="guess"))[0] == 403
        assert (it.server.state, it.worker.role) == ("serving", "decode") and not it.server.drain_requested.is_set()
        assert (await it.call("/internal/drain", b""))[0] == 202, "an empty body is a drain as configured"
        assert it.server.drain_deadline_s is None
