"""A fleet at saturation while clients leave and workers are killed: every request ends, and nothing stays held.

KVBATON_SOAK_S sets how long (default 1,200 s); the seed is printed, and KVBATON_SOAK_SEED sets it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import aiohttp
import psutil
import pytest
from cli.up_process import Up, up

NUM_CLIENTS = 16
WORDS = ("the", "quick", "brown", "fox", "and", "a", "lazy", "dog")


async def client(fleet: Up, rng: random.Random, ends: Counter[str], until_s: float) -> None:
    """Requests one after the other; some are given up on the way."""
    loop = asyncio.get_running_loop()
    while loop.time() < until_s:
        body = {
            "prompt": " ".join(rng.choices(WORDS, k=rng.choice((3, 40, 100)))),
            "max_tokens": rng.choice((1, 8, 40)),
            "ignore_eos": True,
            "stream": rng.random() < 0.6,
            "n": rng.choice((1, 1, 1, 2)),
        }
        patience_s = rng.uniform(0.0, 1.0) if rng.random() < 0.3 else 300.0
        try:
            async with (
                asyncio.timeout(patience_s),
                fleet.http.post(fleet.url + "/v1/completions", json=body) as response,
            ):
                raw = await response.read()
                ends[how_it_ended(response.status, raw, bool(body["stream"]))] += 1
        except TimeoutError:
            ends["gave up" if patience_s < 300 else "HUNG"] += 1
        except aiohttp.ClientError as error:
            ends[f"LOST {type(error).__name__}"] += 1


def how_it_ended(status: int, raw: bytes, stream: bool) -> str:
    """In capitals what must not happen."""
    if status != 200:
        return f"{status} {json.loads(raw)['error']['code']}"
    if not stream:
        return "ok" if json.loads(raw)["choices"][0]["finish_reason"] == "length" else "WRONG END"
    if raw.endswith(b"data: [DONE]\n\n"):
        return "ok"
    return "broken stream" if b'data: {"error":' in raw else "CUT STREAM"


async def killer(fleet: Up, rng: random.Random, until_s: float) -> int:
    loop, num_killed = asyncio.get_running_loop(), 0
    while loop.time() + 15 < until_s:
        await asyncio.sleep(rng.uniform(5, 15))
        workers = [child for child in psutil.Process(fleet.process.pid).children() if "worker" in child.cmdline()]
        if workers:
            rng.choice(workers).send_signal(signal.SIGKILL)
            num_killed += 1
    return num_killed


def idle(members: dict) -> bool:
    gauges = ("num_active", "num_blocks_used", "num_blocks_pinned", "num_leases")
    return all(
        member["state"] == "up" and member["inflight"] == 0 and not any(member["stats"][gauge] for gauge in gauges)
        for member in members.values()
    )


@pytest.mark.slow
async def test_soak(tiny_model_dir: Path, tmp_path: Path) -> None:
    duration_s = float(os.environ.get("KVBATON_SOAK_S", "1200"))
    seed = int(os.environ.get("KVBATON_SOAK_SEED", random.randrange(2**32)))
    print(f"seed {seed}")
    rng, ends = random.Random(seed), Counter[str]()
    async with up(tiny_model_dir, tmp_path, "--prefill", "2", "--decode", "2", "--threshold-tokens", "16") as fleet:
        until_s = asyncio.get_running_loop().time() + duration_s
        async with asyncio.TaskGroup() as group:
            killing = group.create_task(killer(fleet, random.Random(rng.random()), until_s))
            for _ in range(NUM_CLIENTS):
                group.create_task(client(fleet, random.Random(rng.random()), ends, until_s))
        print(dict(ends), "killed", killing.result())
        assert not [end for end in ends if end != end.lower()], ends
        assert ends["ok"] > 0
        await fleet.until(idle)
        status, _, headers = await fleet.post(prompt="the quick brown fox " * 20, max_tokens=4)
        assert (status, headers["x-kvbaton-decision"]) == (200, "remote")
        fleet.process.send_signal(signal.SIGTERM)
        assert await fleet.process.wait() == 0
