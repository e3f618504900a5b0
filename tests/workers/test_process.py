"""A worker as a process: when it says that it is there."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvbaton.config import ModelSettings, WorkerSettings
from kvbaton.types import LocalError
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


async def test_a_worker_whose_engine_ends_has_failed(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody told it to stop: who starts processes again must see that it did not end well."""
    made, make_worker = [], process.make_worker

    def kept(*settings: Any) -> Any:
        made.append(make_worker(*settings))
        return made[0]

    monkeypatch.setattr(process, "make_worker", kept)
    ready = asyncio.Event()
    model = ModelSettings(dir=str(tiny_model_dir), dtype="float32", kv_blocks=16)
    settings = WorkerSettings(role="both", threads=1)
    running = asyncio.ensure_future(
        run_worker(model, settings, KEY, asyncio.Event(), lambda what, **_: ready.set() if what == "ready" else None)
    )
    await asyncio.wait({running, asyncio.ensure_future(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.to_thread(made[0].engine.stop)
    assert await running is False


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
async def test_a_server_that_is_not_there_is_one_sentence(tiny_model_dir: Path, engine: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    model = ModelSettings(dir=str(tiny_model_dir))
    for url, expected in (
        (f"http://127.0.0.1:{port}", "no server answers at http://127.0.0.1:[0-9]+: Connect"),
        (f"http://127.0.0.1:{port}/v1", "is not http://host:port"),
        ("http://127.0.0.1:x", "is not http://host:port"),
        ("http://:80", "is not http://host:port"),
        (f"http://127.0.0.1:{port}#x", "is not http://host:port"),
        (f"http://admin:hunter2@127.0.0.1:{port}", "^an engine's address has no user"),
    ):
        settings = WorkerSettings(engine=engine, engine_url=url, role="decode")
        with pytest.raises(LocalError, match=expected) as refused:
            await run_worker(model, settings, KEY, asyncio.Event(), lambda what, **_: None)
        assert refused.value.field == "engine_url" and refused.value.fix
