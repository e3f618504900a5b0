"""Formulas against the numbers every reader checks first."""

from __future__ import annotations

import pytest

from kvbaton.plan.closed_forms import (
    PhaseWorkers,
    best_ratio,
    capacity,
    cost_per_million_usd,
    distserve_ttft_s,
    md1_wait_s,
    mg1_wait_s,
    pool_rate,
    workers_for,
)
from kvbaton.plan.kv_math import Sharding
from kvbaton.types import LocalError


def test_distserve_two_to_one() -> None:
    best = best_ratio(5.6, 10.0, max_workers=3)
    assert (best.prefill, best.decode, best.bottleneck) == (2, 1, "decode")
    assert best.rate_per_worker == pytest.approx(3.33, abs=0.005)
    one_each = pool_rate(1, 1, 5.6, 10.0)
    assert one_each.rate_per_worker / 1.6 == pytest.approx(1.75)  # colocated carries 1.6
    assert one_each.bottleneck == "prefill"
    assert pool_rate(2, 1, 5.0, 10.0).bottleneck == "balanced"


def test_cost_identities() -> None:
    alone = cost_per_million_usd(8, 2.0, 22_282)
    assert alone == pytest.approx(0.1995, abs=0.00005)
    fleet = cost_per_million_usd(12 * 8, 2.0, 9 * 22_282)  # twelve nodes paid, nine of them put out tokens
    assert fleet == pytest.approx(0.266, abs=0.0005)
    assert cost_per_million_usd(8, 2.0, 0) == float("inf")


def test_queues() -> None:
    assert md1_wait_s(0.5, 1.0) == pytest.approx(0.5)
    assert md1_wait_s(0.9, 1.0) == pytest.approx(4.5)
    assert md1_wait_s(1.0, 1.0) == float("inf")
    assert mg1_wait_s(0.5, 1.0, 1.0) == md1_wait_s(0.5, 1.0)
    assert mg1_wait_s(0.5, 1.0, 2.0) == pytest.approx(1.0)  # exponential service: M/M/1


def test_tensor_parallel_wins_when_idle_and_stages_win_when_busy() -> None:
    """DistServe, section 3.1: with two GPUs and an imperfect tensor-parallel speedup the lines cross."""
    idle, busy = 0.1, 1.7
    assert distserve_ttft_s(idle, 1.0, speedup=1.7) < distserve_ttft_s(idle, 1.0, pipeline=2)
    assert distserve_ttft_s(busy, 1.0, speedup=1.7) > distserve_ttft_s(busy, 1.0, pipeline=2)
    rate = 0.8
    assert distserve_ttft_s(rate, 1.0, pipeline=2) == pytest.approx(1.0 + rate / (4 * (2 - rate)))
    assert distserve_ttft_s(rate, 1.0, speedup=1.7) == pytest.approx(1 / 1.7 + rate / (2 * 1.7 * (1.7 - rate)))


def test_context_parallel_counts_gpus_pl_11() -> None:
    found = capacity(
        PhaseWorkers(Sharding(cp=8), workers=2, rate_per_worker=12.0),
        PhaseWorkers(Sharding(tp=4, dp=2), workers=1, rate_per_worker=24.0),
    )
    assert found.num_gpus == 16 + 8
    assert found.rate_per_gpu == 1.0
    assert "cp8" in found.layout


def test_capacity_counts_queueing_too_pl_12() -> None:
    found = capacity(
        PhaseWorkers(Sharding(), workers=3, rate_per_worker=3.5, batch=4, latency_s=2.0),
        PhaseWorkers(Sharding(), workers=1, rate_per_worker=9.0),
    )
    assert found.rate_per_s == 6.0
    assert found.terms == {"prefill_raw": 10.5, "prefill_at_latency": 6.0, "decode": 9.0}
    assert found.bottleneck == "prefill"


def test_workers_for() -> None:
    assert [workers_for(rate, 2.0) for rate in (0.1, 2.0, 2.1, 20.0)] == [1, 1, 2, 10]
    assert workers_for(10.0, 2.0, headroom=0.25) == 7
    with pytest.raises(LocalError):
        workers_for(1.0, 0.0)
    with pytest.raises(LocalError):
        best_ratio(1.0, 1.0, 1)
