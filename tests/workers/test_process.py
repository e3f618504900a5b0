"""A worker as a process: when it says that it is there."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvbaton.config import ModelSettings, WorkerSettings
from kvbaton.workers import process
from kvbaton.workers.process import run_worker

KEY = "k" * 20


async def test_as_12_a_worker_is_there_only_when_what_is_slow_once_is_done(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading is held up: until it ends nothing is reported and nobody listens; then the first request is served."""
    held, make_worker = threading.Event(), process.make_worker
    loading = asyncio.Event()
    loop = asyncio.get_running_loop()

    def held_up(*settings: Any) -> Any:
        loop.call_soon_threadsafe(loading.set)
        assert held.wait(120)
        return make_worker(*settings)

    monkeypatch.setattr(process, "make_worker", held_up)
    told: dict[str, Any] = {}
    ready = asyncio.Event()

    def report(event: str, **what: Any) -> None:
        if event == "ready":
            told.update(what)
            ready.set()

    stop = asyncio.Event()
    model = ModelSettings(dir=str(tiny_model_dir), dtype="float32", kv_blocks=16)
    running = asyncio.ensure_future(run_worker(model, WorkerSettings(role="both", threads=1), KEY, stop, report))
    try:
        await loading.wait()
        assert not ready.is_set() and not running.done()
        held.set()
        await ready.wait()
        url = f"http://{told['host']}:{told['port']}"
        async with aiohttp.ClientSession() as http:
            async with http.get(url + "/ready") as answer:
                assert answer.status == 200
            async with http.post(url + "/v1/completions", json={"prompt": "ab", "max_tokens": 2}) as answer:
                assert answer.status == 200 and (await answer.json())["usage"]["completion_tokens"] > 0
    finally:
        held.set()
        stop.set()
        await running
