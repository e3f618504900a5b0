"""A worker follows a publisher of KV events over real sockets: late, through losses, restarts and nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from workers.event_publisher import publishing
from workers.scripted import serving, until
from workers.test_vllm import FakeVllm, start
from workers.test_vllm_kv_events import PROMPT, SIZE, stored

from kvbaton.clock import MonotonicClock
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.kv.blocks import block_hashes
from kvbaton.types import LocalError
from kvbaton.workers import vllm_kv_follow
from kvbaton.workers.kv_events import KVEventLog, KVEventsAnswer
from kvbaton.workers.server import ServerOptions, WorkerServer
from kvbaton.workers.vllm import VllmOptions, VllmWorker
from kvbaton.workers.vllm_kv_events import EngineBlocks
from kvbaton.workers.vllm_kv_follow import EventEndpoints, KVEventFollower, parse_endpoints


def told(log: KVEventLog) -> set[bytes]:
    """What a reader of the log takes the worker to hold."""
    held: set[bytes] = set()
    for change in log.read(0).batches:
        held = (set() if change.cleared else held - set(change.removed)) | set(change.stored)
    return held


def prompt(number: int) -> list[int]:
    return [number + 1] * SIZE


def ours(*numbers: int) -> set[bytes]:
    return {one for number in numbers for one in block_hashes(prompt(number), SIZE)}


def event(number: int) -> Any:
    return stored("bytes", "map", prompt(number))


class Following:
    def __init__(self, endpoints: EventEndpoints) -> None:
        self.blocks = EngineBlocks(SIZE)

        async def snapshot() -> tuple[int, list[bytes]]:
            return self.log.next_sequence, self.blocks.held()

        self.log = KVEventLog("life", SIZE, snapshot, MonotonicClock())
        self.follower = KVEventFollower(endpoints, self.blocks, self.log)

    async def holds(self, *numbers: int) -> None:
        await until(lambda: told(self.log) == ours(*numbers))
        assert set((await self.log.snapshot())[1]) == ours(*numbers)


@asynccontextmanager
async def following(endpoints: EventEndpoints) -> AsyncIterator[Following]:
    found = Following(endpoints)
    task = asyncio.create_task(found.follower.run())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("topic_in_replay", [True, False])
async def test_it_learns_what_was_before_and_what_comes(topic_in_replay: bool) -> None:
    async with publishing(topic_in_replay=topic_in_replay) as (publisher, endpoints):
        await publisher.publish(event(0))
        async with following(endpoints) as found:
            await publisher.subscribed()
            await found.holds(0)
            await publisher.publish(event(1))
            await found.holds(0, 1)


async def test_sockets_in_the_file_system_work_too(tmp_path: Path) -> None:
    endpoints = EventEndpoints(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay")
    async with following(endpoints) as found, publishing(endpoints) as (publisher, _):
        await publisher.subscribed()
        await publisher.publish(stored("int", "array", PROMPT))
        await until(lambda: told(found.log) == set(block_hashes(PROMPT, SIZE)))


async def test_a_lost_batch_is_replayed() -> None:
    async with publishing() as (publisher, endpoints), following(endpoints) as found:
        await publisher.subscribed()
        await found.follower.synced.wait()
        await publisher.publish(event(0))
        await publisher.publish(event(1), lost=True)
        await publisher.publish(event(2))
        await found.holds(0, 1, 2)
        assert found.follower.order.num_gaps == 1
        assert not any(change.cleared for change in found.log.read(0).batches)


async def test_a_lost_last_batch_is_asked_for_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_kv_follow, "LOOK_AGAIN_S", 0.1)
    async with publishing() as (publisher, endpoints), following(endpoints) as found:
        await publisher.subscribed()
        await publisher.publish(event(0), lost=True)
        await found.holds(0)


async def test_what_is_lost_for_good_is_forgotten_and_learnt_anew() -> None:
    async with publishing(buffer_steps=2) as (publisher, endpoints), following(endpoints) as found:
        await publisher.subscribed()
        await found.follower.synced.wait()
        await publisher.publish(event(0))
        await found.holds(0)
        for number in (1, 2, 3):
            await publisher.publish(event(number), lost=True)
        await publisher.publish(event(4))
        await found.holds(3, 4)


async def test_a_publisher_without_replays_is_followed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_kv_follow, "REPLAY_STEP_S", 0.05)
    async with publishing() as (publisher, endpoints):
        publisher.replays = False
        async with following(endpoints) as found:
            await publisher.subscribed()
            await found.follower.synced.wait()
            await publisher.publish(event(0))
            await publisher.publish(event(1), lost=True)
            await publisher.publish(event(2))
            await found.holds(2)


async def test_a_server_that_restarts_is_a_new_one(tmp_path: Path) -> None:
    endpoints = EventEndpoints(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay")
    async with following(endpoints) as found:
        for number in (0, 1):
            async with publishing(endpoints) as (publisher, _):
                await publisher.subscribed()
                await publisher.publish(event(number))
                await found.holds(number)
            await until(lambda: not told(found.log))


async def test_nonsense_is_survived() -> None:
    async with publishing() as (publisher, endpoints), following(endpoints) as found:
        await publisher.subscribed()
        await publisher.publish(event(0))
        await found.holds(0)
        await publisher.publish_raw(b"\xff\xff")
        await found.holds()
        await publisher.publish(event(1))
        await found.holds(1)
        assert found.follower.num_unreadable == 1


def test_endpoints_as_text() -> None:
    assert parse_endpoints("tcp://h:1, tcp://h:2") == EventEndpoints("tcp://h:1", "tcp://h:2")
    assert parse_endpoints("tcp://h:1") == EventEndpoints("tcp://h:1")
    for text in ("h:1", "tcp://*:1", "tcp://h:1,tcp://h:2,tcp://h:3", "tcp://"):
        with pytest.raises(LocalError, match="KV events come from") as caught:
            parse_endpoints(text)
        assert caught.value.field == "engine_events"


async def test_a_worker_over_vllm_tells_its_router_in_the_servers_block_size(tiny_model_dir: Path) -> None:
    """From the server's socket to what a router reads: one block of 128 tokens."""
    tokens = [index % 300 for index in range(128)]
    stored_block = {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": 128,
    }
    async with AsyncExitStack() as stack:
        publisher, endpoints = await stack.enter_async_context(publishing())
        host, port = await start(stack, FakeVllm())
        options = VllmOptions(f"http://{host}:{port}", "decode", "m", events=endpoints)
        worker = VllmWorker(options, ModelConfig.from_dir(tiny_model_dir), Tokenizer.load(tiny_model_dir))
        await worker.start()
        stack.push_async_callback(worker.stop)
        await publisher.subscribed()
        await publisher.publish(stored_block)
        app = WorkerServer(worker, ServerOptions(block_size=worker.block_size, internal_key="k" * 20))
        url = await stack.enter_async_context(serving(app))
        http = await stack.enter_async_context(aiohttp.ClientSession(headers={"x-kvbaton-key": "k" * 20}))
        async with http.get(f"{url}/internal/info") as response:
            info = await response.json()
        assert info["kv_events"] and info["block_size"] == 128
        async with http.get(f"{url}/internal/kv-events?from=0&wait_s=20") as response:
            answer = msgspec.msgpack.decode(await response.read(), type=KVEventsAnswer)
        assert answer.block_size == 128
        assert [batch.stored for batch in answer.batches] == [tuple(block_hashes(tokens, 128))]
