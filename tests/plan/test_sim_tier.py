"""The host cache tier: it holds what the LRU curve says, loading takes its time, and it never makes a prompt later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvbaton.plan.link import LinkModel
from kvbaton.plan.sim import simulate
from kvbaton.plan.sim_spec import FleetSpec, HandoffSpec, PoolSpec, WorkerSpec
from kvbaton.plan.step_time import StepModel, StepWork, pairs
from kvbaton.plan.trace_stats import cache_hits
from kvbaton.plan.workload import Trace, TraceRequest, read_trace

STEP = StepModel(0.010, 100e-6, 2e-9, 100e-6, 1e-7, source="test")
LOAD_S = 5e-6


def worker(**terms: object) -> WorkerSpec:
    spec = WorkerSpec(step=STEP, num_blocks=20, block_size=64, max_batch_tokens=4096, max_running=4)
    return msgspec.structs.replace(spec, **terms)


def single(**terms: object) -> FleetSpec:
    return FleetSpec((PoolSpec("both", 1, worker(**terms)),))


def visits() -> Trace:
    """A prompt, two others that push it out of the 20 blocks of the GPU, and the first again."""
    family = ((1, 10), (2, 10), (3, 10), (1, 10))
    requests = tuple(
        TraceRequest(5.0 * number, 64 * blocks, 4, tuple(name * 1000 + n for n in range(blocks)))
        for number, (name, blocks) in enumerate(family)
    )
    return Trace("visits", requests, block_tokens=64)


def test_a_block_that_left_the_gpu_is_loaded_and_not_computed() -> None:
    bare, tiered = simulate(single(), visits()), simulate(single(tier_blocks=100, tier_s_per_token=LOAD_S), visits())
    assert bare.cached_tokens == 0
    assert tiered.cached_tokens == 9 * 64  # the last token of a prompt is always computed, so its block is too
    computed = STEP.step_s(StepWork(64, pairs(9 * 64, 64)))
    assert tiered.ttft_s[-1] == pytest.approx(9 * 64 * LOAD_S + computed)
    assert tiered.ttft_s[:3] == bare.ttft_s[:3]


def test_loading_that_takes_longer_than_computing_is_not_done() -> None:
    slow = simulate(single(tier_blocks=100, tier_s_per_token=1e-3), visits())
    assert slow.cached_tokens == 0
    assert slow.ttft_s == simulate(single(), visits()).ttft_s


def test_a_tier_too_small_has_lost_it_too() -> None:
    assert simulate(single(tier_blocks=15, tier_s_per_token=LOAD_S), visits()).cached_tokens == 0


def test_one_load_at_a_time() -> None:
    requests = (*visits().requests, TraceRequest(15.0, 640, 4, tuple(2000 + n for n in range(10))))
    trace = msgspec.structs.replace(visits(), requests=requests)
    result = simulate(single(tier_blocks=100, tier_s_per_token=LOAD_S, num_blocks=24), trace)
    assert result.ttft_s[-1] >= 2 * 9 * 64 * LOAD_S
    assert result.outcomes == {"done": 5} or set(result.outcomes.values()) == {5}


def test_the_split_has_the_same_tier() -> None:
    handoff = HandoffSpec(LinkModel(1e-3, 2e10), 20_000, 30)
    tiered = worker(tier_blocks=100, tier_s_per_token=LOAD_S)
    fleet = FleetSpec((PoolSpec("prefill", 1, tiered), PoolSpec("decode", 1, worker(num_blocks=12))), handoff)
    result = simulate(fleet, visits())
    assert result.cached_tokens == 9 * 64
    assert result.num_requests == len(result.ttft_s)


@pytest.mark.parametrize("tier_tokens", [2_600_000, 5_100_000])
def test_hits_follow_the_lru_curve(shared: Callable[[str], Path], tier_tokens: int) -> None:
    """One worker, one request at a time: GPU and tier together find what an LRU of the tier's size finds."""
    trace = read_trace(shared("mooncake-fast25") / "synthetic_trace.jsonl").head(1_500)
    spaced = tuple(
        msgspec.structs.replace(each, arrival_s=1e4 * number, output_tokens=1)
        for number, each in enumerate(trace.requests)
    )
    trace = msgspec.structs.replace(trace, requests=spaced)
    fleet = single(num_blocks=400, block_size=512, max_batch_tokens=1 << 20, tier_blocks=tier_tokens // 512,
                   tier_s_per_token=1e-9)  # fmt: skip
    expected = cache_hits(trace, tier_tokens)[0]
    assert expected > 0.05
    found = simulate(fleet, trace)
    assert found.token_hit == pytest.approx(expected, abs=0.01)
    assert simulate(single(num_blocks=400, block_size=512, max_batch_tokens=1 << 20), trace).token_hit < expected - 0.04
