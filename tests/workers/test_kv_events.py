"""A worker's KV events: the log, its endpoints, and that a real worker's log tells what its cache holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workers.scripted import ScriptedWorker, serving, until

from kvbaton.clock import MonotonicClock
from kvbaton.config import ModelSettings, WorkerSettings
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.kv.blocks import HASH_BYTES, BlockEvents, block_hashes
from kvbaton.workers.kv_events import KVEventLog, KVEventsAnswer, hashes_worth_keeping, split_events
from kvbaton.workers.native import NativeWorker
from kvbaton.workers.process import make_worker
from kvbaton.workers.server import ServerOptions, WorkerServer

KEY = "k" * 20
WITH_KEY = {"x-kvbaton-key": KEY}
ANSWER = msgspec.msgpack.Decoder(KVEventsAnswer)


def name(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "big")


def stored(*numbers: int) -> BlockEvents:
    return BlockEvents(stored=tuple(name(n) for n in numbers))


def make_log(max_hashes: int = 100, hashes: list[bytes] | None = None) -> KVEventLog:
    async def snapshot() -> tuple[int, list[bytes]]:
        return log.next_sequence, list(hashes or [])

    log = KVEventLog("life-1", 16, snapshot, MonotonicClock(), max_hashes)
    return log


def test_batches_are_numbered_from_the_start_of_a_life() -> None:
    log = make_log()
    assert log.read(0).batches == () and not log.read(0).gap
    log.append(stored(1))
    log.append(BlockEvents(removed=(name(1),), stored=(name(2),)))
    assert log.read(0).batches == (stored(1), BlockEvents(removed=(name(1),), stored=(name(2),)))
    assert log.read(1).batches == (BlockEvents(removed=(name(1),), stored=(name(2),)),)
    assert log.read(2).batches == () and not log.read(2).gap
    assert log.read(3).gap, "a number from another life"
    assert (log.read(0).incarnation, log.read(0).block_size, log.next_sequence) == ("life-1", 16, 2)


def test_the_ring_is_bounded_and_says_what_it_lost() -> None:
    log = make_log(max_hashes=10)
    for number in range(100):
        log.append(stored(number))
    assert log.read(0).gap and log.read(94).gap
    assert log.read(95).batches == tuple(stored(n) for n in range(95, 100)), "each batch counts one more than it names"
    log.append(stored(*range(50)))
    assert log.read(100).gap and log.next_sequence == 101, "larger than the ring: nothing is left, and it shows"


def test_a_small_cache_keeps_no_history_that_fills_memory_for_an_hour() -> None:
    assert [hashes_worth_keeping(each) for each in (10, 640, 10_000, 1 << 20)] == [4096, 5120, 80_000, 1 << 18]
    log = make_log(hashes_worth_keeping(640))
    for number in range(20_000):
        log.append(stored(number))
    assert log._num_hashes + len(log._batches) <= 5120 and not log.read(19_990).gap


def test_an_answer_is_bounded_but_never_empty_while_there_is_more() -> None:
    log = make_log(max_hashes=1000)
    for number in range(10):
        log.append(stored(*range(number * 10, number * 10 + 10)))
    assert [len(log.read(0, limit).batches) for limit in (1, 11, 22, 500)] == [1, 1, 2, 10]


@settings(deadline=None)
@given(st.booleans(), st.integers(0, 20), st.integers(0, 20), st.integers(1, 7))
def test_a_split_change_is_the_same_change(cleared: bool, num_removed: int, num_stored: int, limit: int) -> None:
    removed, fresh = tuple(map(name, range(num_removed))), tuple(map(name, range(100, 100 + num_stored)))
    held = set(removed) | {name(50)}
    parts = split_events(BlockEvents(cleared, removed, fresh), limit)
    assert all(part.num_hashes <= limit for part in parts)
    for part in parts:
        held = (set() if part.cleared else held) - set(part.removed) | set(part.stored)
    assert held == (set() if cleared else {name(50)}) | set(fresh)


async def test_a_reader_that_waits_is_woken_from_another_thread() -> None:
    log = make_log()
    waiting = asyncio.ensure_future(log.wait_for(0, 30.0))
    await until(lambda: bool(log._waiting))
    thread = threading.Thread(target=log.append, args=(stored(1),))
    thread.start()
    await waiting
    thread.join()
    assert not log._waiting
    await log.wait_for(0, 30.0)  # there already
    await log.wait_for(7, 30.0)  # never will be
    await log.wait_for(1, 0.01)  # time is up
    assert not log._waiting


# -- over HTTP -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def get(http: aiohttp.ClientSession, url: str, headers: Any = WITH_KEY) -> tuple[int, bytes, Any]:
    async with http.get(url, headers=headers) as response:
        return response.status, await response.read(), response.headers


async def test_events_and_snapshot_over_http(tokenizer: Tokenizer, http: aiohttp.ClientSession) -> None:
    worker = ScriptedWorker(tokenizer)
    hashes = [name(n) for n in range(9000)]
    worker.kv_events = make_log(hashes=hashes)
    worker.kv_events.append(stored(1, 2))
    server = WorkerServer(worker, ServerOptions(block_size=16, internal_key=KEY))
    assert server.info().kv_events
    async with serving(server) as url:
        status, body, _ = await get(http, url + "/internal/kv-events?from=0")
        assert status == 200 and ANSWER.decode(body).batches == (stored(1, 2),)
        status, body, _ = await get(http, url + "/internal/kv-events?from=5&wait_s=20")
        assert status == 200 and ANSWER.decode(body).gap
        waiting = asyncio.ensure_future(get(http, url + "/internal/kv-events?from=1&wait_s=20"))
        await until(lambda: bool(worker.kv_events and worker.kv_events._waiting))
        worker.kv_events.append(stored(3))
        assert ANSWER.decode((await waiting)[1]).batches == (stored(3),)
        status, body, headers = await get(http, url + "/internal/kv-snapshot")
        assert (status, headers["x-kvbaton-sequence"], headers["x-kvbaton-incarnation"]) == (200, "2", "life-1")
        assert [body[i : i + HASH_BYTES] for i in range(0, len(body), HASH_BYTES)] == hashes


@pytest.mark.parametrize("query", ["from=x", "from=-1", "from=" + "9" * 19, "wait_s=21", "wait_s=nan", "wait_s=x"])
async def test_a_bad_query_is_refused_by_name(tokenizer: Tokenizer, http: aiohttp.ClientSession, query: str) -> None:
    worker = ScriptedWorker(tokenizer)
    worker.kv_events = make_log()
    async with serving(WorkerServer(worker, ServerOptions(block_size=16, internal_key=KEY))) as url:
        status, body, _ = await get(http, f"{url}/internal/kv-events?{query}")
        assert status == 400 and msgspec.json.decode(body)["error"]["param"] == query.split("=")[0]


async def test_only_the_fleet_may_read(tokenizer: Tokenizer, http: aiohttp.ClientSession) -> None:
    """SE-06: what is cached tells about prompts, so neither endpoint answers without the key."""
    worker = ScriptedWorker(tokenizer)
    worker.kv_events = make_log()
    async with serving(WorkerServer(worker, ServerOptions(block_size=16, internal_key=KEY))) as url:
        for path in ("/internal/kv-events", "/internal/kv-snapshot"):
            assert (await get(http, url + path, {}))[0] == 403
            assert (await get(http, url + path, {"x-kvbaton-key": "wrong"}))[0] == 403


async def test_a_worker_without_events_says_so(tokenizer: Tokenizer, http: aiohttp.ClientSession) -> None:
    server = WorkerServer(ScriptedWorker(tokenizer), ServerOptions(block_size=16, internal_key=KEY))
    assert not server.info().kv_events
    async with serving(server) as url:
        assert (await get(http, url + "/internal/kv-events"))[0] == 404


# -- a real worker -------------------------------------------------------------------------------------------------


def replay(log: KVEventLog) -> set[bytes]:
    held: set[bytes] = set()
    first = 0
    while batches := log.read(first).batches:
        first += len(batches)
        for batch in batches:
            held = (set() if batch.cleared else held) - set(batch.removed) | set(batch.stored)
    return held


async def test_a_real_workers_log_tells_what_its_cache_holds(
    tiny_model_dir: Path, tokenizer: Tokenizer, http: aiohttp.ClientSession
) -> None:
    """More prompts than its blocks can hold, so that some are evicted; then everything is cleared."""
    model = ModelSettings(dir=str(tiny_model_dir), name="tiny", dtype="float32", kv_blocks=24)
    worker: NativeWorker = make_worker(model, WorkerSettings(role="both", chunk_tokens=64))
    await worker.start()
    try:
        app = WorkerServer(worker, ServerOptions(block_size=16, model_name="tiny", internal_key=KEY))
        async with serving(app) as url:
            for start in range(6):
                prompt = [start + 1] * 100
                body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
                async with http.post(url + "/v1/completions", json=body) as response:
                    assert response.status == 200
                held = replay(worker.kv_events)
                assert set(block_hashes(prompt, 16)) <= held, "an answer that ended is in the log"
                sequence, hashes = await worker.kv_events.snapshot()
                assert (sequence, set(hashes)) == (worker.kv_events.next_sequence, held)
            assert len(held) < 36, "something was evicted"
            await asyncio.wrap_future(worker.engine.call(type(worker.engine).clear_cache))
            assert (await worker.kv_events.snapshot())[1] == [] and replay(worker.kv_events) == set()
    finally:
        await worker.stop()
