"""A leak put into real worker processes is found by what a soak looks at, in lives of a few hundred requests."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from random import Random

import pytest

from kvbaton.drill import fleet
from kvbaton.drill.resources import FEWEST_WINDOWS, SETTLING_REQUESTS, WINDOW_REQUESTS, Slope, Watch, slopes
from kvbaton.drill.soak import builders
from kvbaton.drill.soak_load import Mixture, TraceLoad
from kvbaton.drill.tiny_model import write_tiny_model
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.plan.workload import Trace, TraceRequest
from kvbaton.router.control import Command

KEPT_KIB = 10
# Runs at the start of every process of the fleet; those that are workers keep something of each answer they give.
LEAK = f"""
import sys
if "worker" in sys.orig_argv:
    from kvbaton.workers import http_cycle
    kept, begin = [], http_cycle.Cycle.begin
    def keeping(self, status, headers):
        if self.scope["path"].startswith("/v1/"):
            kept.append(b"x" * {KEPT_KIB * 1024} + bytes([len(kept) % 256]))
        begin(self, status, headers)
    http_cycle.Cycle.begin = keeping
"""
NUM_REQUESTS = round(SETTLING_REQUESTS + 2 * FEWEST_WINDOWS * WINDOW_REQUESTS)
LOOK_EVERY, AT_ONCE = 10, 4


async def watched(model: Path, logs: Path) -> dict[str, Slope]:
    """One life of each kind, and no fault in it. Looks are taken after so many requests and not after some time."""
    flags = ["--prefill", "1", "--decode", "1", "--model", str(model), "--dtype", "float32", "--transport", "tcp"]
    flags += ["--kv-blocks", "256", "--threshold-tokens", "16", "--no-ui"]
    mixture = Mixture([Trace("short", (TraceRequest(0.0, 60, 6), TraceRequest(0.0, 30, 3)))], 60, 6)
    watch, rng = Watch(), Random(0)
    wanted = mixture.requests(rng)
    async with (
        fleet.started(flags, logs) as target,
        TraceLoad(target.url, mixture, builders(Tokenizer.load(model), 0), 300.0) as load,
    ):
        for number in range(0, NUM_REQUESTS, LOOK_EVERY):
            processes = [
                (each.name, each.role, each.pid) for each in (await target.command(Command("status"))).processes
            ]
            alive = [(name, role, pid) for name, role, pid in processes if pid is not None]
            watch.look(alive, 10.0 * number, len(load.sent))
            for first in range(0, LOOK_EVERY, AT_ONCE):
                for _ in range(min(AT_ONCE, LOOK_EVERY - first)):
                    load.send(next(wanted), rng, None)
                await load.ended()
        assert {each.ending for each in load.sent} == {"whole"}
    return {slope.kind: slope for slope in slopes(watch.lives.values(), float("inf"))}


@pytest.mark.slow
@pytest.mark.parametrize("leaks", [True, False])
def test_ten_kilobytes_of_each_request_are_found_in_a_real_worker(
    leaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LEAK if leaks else "")
    ours = [str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, ours)))
    found = asyncio.run(watched(write_tiny_model(tmp_path / "tiny"), tmp_path))
    print(found)
    assert found["prefill"].problems == [] and found["router"].problems == []
    if leaks:
        assert found["decode"].kib_per_request == pytest.approx(KEPT_KIB, rel=0.4)
        assert any("KiB with every request" in each for each in found["decode"].problems)
    else:
        assert found["decode"].problems == []
