"""A running fleet of processes, traffic on it, and a real browser that looks at its page."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
from router.processes import ProcessFleet


def _load_browser() -> ModuleType:
    path = Path(__file__).parents[1] / "bench" / "browser.py"
    spec = importlib.util.spec_from_file_location("bench_browser", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


browser = _load_browser()
SIZES = {"light": (1440, 900), "dark": (1440, 900), "phone": (390, 844)}
WORDS = ["the", "and", "you", "in", "of", "a", "to", "it", "is", "that", "was", "for", "on", "are", "with", "as", "at"]


class Traffic:
    """Streams of random words, a few at once, until closed. Seeded: the same prompts each time."""

    def __init__(self, url: str, session: aiohttp.ClientSession, words: tuple[int, int], max_tokens: int) -> None:
        self._url, self._session, self._words, self._max_tokens = url, session, words, max_tokens
        self.num_ended = 0
        self.ended = asyncio.Event()  # at least one request did

    async def run(self, seed: int) -> None:
        chance = random.Random(seed)
        while True:
            prompt = " ".join(chance.choices(WORDS, k=chance.randint(*self._words)))
            body = {"prompt": prompt, "stream": True, "max_tokens": chance.randint(4, self._max_tokens)}
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            self.num_ended += 1
            self.ended.set()
            self.ended.clear()


@asynccontextmanager
async def traffic(
    url: str, num: int = 3, words: tuple[int, int] = (8, 90), max_tokens: int = 60
) -> AsyncIterator[Traffic]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        await _ready(url, session)
        flow = Traffic(url, session, words, max_tokens)
        tasks = [asyncio.ensure_future(flow.run(seed)) for seed in range(num)]
        try:
            yield flow
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


async def _ready(url: str, session: aiohttp.ClientSession) -> None:
    """A router that has just started has not heard of its workers yet."""
    async with asyncio.timeout(60):
        while True:
            async with session.get(f"{url}/ready") as answer:
                if answer.status == 200:
                    return


async def state_of(url: str, query: str = "") -> Any:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/ui/state{query}") as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def wait_until(page: Any, expression: str) -> None:
    """Let the page look at itself again and again until ``expression`` is true in it."""
    look = f"new Promise(done => {{ const look = () => ({expression}) ? done(true) : setTimeout(look, 50); look(); }})"
    found = await page.call("Runtime.evaluate", expression=look, awaitPromise=True, returnByValue=True)
    assert found["result"].get("value") is True, found


def problems(page: Any, url: str) -> list[str]:
    """What went wrong in the page; asking its own router for things is what it is for."""
    return [each for each in page.problems if not each.startswith(f"the page asked for {url}/ui")]


def new_fleet(model_dir: Path, folder: Path, **router_settings: str) -> ProcessFleet:
    fleet = ProcessFleet(model_dir, folder)
    fleet.router.environ = {f"KVBATON_ROUTER_{key.upper()}": value for key, value in router_settings.items()}
    return fleet
