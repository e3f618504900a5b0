"""The metrics cases on a split fleet of real engines: each figure once, by whoever knows it; zero when all is over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from router.gates import gate_of
from router.test_real_fleet import PROMPT, RealFleet, real_fleet
from workers.scripted import until

from kvbaton.observe.metrics import METRICS

PACKAGE = Path(__file__).parents[2] / "kvbaton"


@pytest.fixture
async def split(tiny_model_dir: Path) -> AsyncIterator[RealFleet]:
    async with real_fleet(tiny_model_dir, {"p0": "prefill", "d0": "decode"}) as fleet:
        yield fleet


def samples(exposition: bytes) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(exposition.decode())
    return [(s.name, s.labels, s.value) for family in families for s in family.samples]


def total(exposition: bytes, name: str, **labels: str) -> float:
    found = [value for n, have, value in samples(exposition) if n == name and labels.items() <= have.items()]
    return sum(found)


async def leave_after(fleet: RealFleet, body: dict[str, Any], num_bytes: int) -> None:
    """Ask, read so much, and hang up."""
    host, port = fleet.fleet.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
    await writer.drain()
    if num_bytes:
        async with asyncio.timeout(30):
            await reader.readexactly(num_bytes)
    writer.close()


async def test_mt_01_as_many_first_tokens_as_requests_that_had_one(split: RealFleet) -> None:
    for i in range(9):
        await split.ask(prompt=f"{i} {PROMPT}", max_tokens=3, stream=bool(i % 2))
    endless = {"prompt": PROMPT * 3, "max_tokens": 400, "logit_bias": {"258": -100}, "stream": True}
    gated = gate_of(split.workers["d0"])
    left = split.fleet.metrics.values("kvbaton_router_requests_total")
    for stream, num_bytes in [(True, 400)] * 3 + [(False, 0)] * 3:  # into the first events: the head alone is shorter
        gated.gate.clear()  # the first token is prefill's, a second one is never made
        await leave_after(split, {**endless, "stream": stream}, num_bytes)
        await until(lambda before=left: split.fleet.metrics.values("kvbaton_router_requests_total") != before)  # type: ignore[misc]
        left = split.fleet.metrics.values("kvbaton_router_requests_total")
        gated.gate.set()
        await split.check_empty()
    exposition = split.fleet.metrics.exposition()
    by_outcome = {o: total(exposition, "kvbaton_router_requests_total", outcome=o) for o in ("ok", "cancelled")}
    assert by_outcome == {"ok": 9, "cancelled": 6}
    # Of the nine, four were streams: a whole answer has no first token of its own.
    assert total(exposition, "kvbaton_router_ttft_seconds_count") == 4 + 3


async def test_mt_02_mt_03_each_figure_is_exported_by_one_side_only(split: RealFleet) -> None:
    num_prompt = 0
    for i in range(10):
        raw = await split.ask(prompt=[i + 1, *range(1, 200)], max_tokens=4, stream=True)
        assert raw.endswith(b"[DONE]\n\n")
        num_prompt += 200
    await split.check_empty()
    router = split.fleet.metrics.exposition()
    assert total(router, "kvbaton_router_ttft_seconds_count") == 10
    for worker in split.workers.values():
        for metric in METRICS:
            if metric.where == "worker":
                assert "ttft" not in metric.name and "itl" not in metric.name, "what a user sees is the router's to say"
        assert worker.stats().num_transfers == 10
    prefill, decode = split.workers["p0"].stats(), split.workers["d0"].stats()
    computed = prefill.num_prompt_tokens + decode.num_prompt_tokens
    assert prefill.num_prompt_tokens == num_prompt == computed, "what came by transfer was computed once"
    assert decode.transfer_bytes_received == prefill.transfer_bytes_sent > 0


async def test_mt_08_gauges_are_zero_after_clients_left_at_random_points(split: RealFleet) -> None:
    rng, body = Random(8), {"max_tokens": 60, "stream": True, "logit_bias": {"258": -100}}
    for _ in range(4):
        await asyncio.gather(*(
            leave_after(split, {**body, "prompt": f"{rng.random()} {PROMPT * rng.choice((1, 6))}"},
                        rng.choice((0, 0, 50, 300, 900, 3000)))
            for _ in range(10)
        ))  # fmt: skip
    await split.check_empty()
    split.fleet.registry.export()
    split.fleet.dispatcher.export()
    for name, labels, value in samples(split.fleet.metrics.exposition()):
        if "inflight" in name or "queued_requests" in name:
            assert value == 0, (name, labels)
    for worker in split.workers.values():
        stats = worker.stats()
        assert (stats.num_active, stats.num_running, stats.num_waiting, stats.waiting_prompt_tokens) == (0, 0, 0, 0)


def test_mt_09_every_declared_metric_is_moved_by_the_product() -> None:
    """A name that is declared and written nowhere else is never moved."""
    sources = [path.read_text() for path in PACKAGE.rglob("*.py") if path.name not in ("metrics.py", "queries.py")]
    text = "\n".join(source for source in sources if "observe.metrics" in source or "_metrics" in source)
    missing = [m.name for m in METRICS if not m.stat and f'"{m.name}"' not in text]
    assert not missing
