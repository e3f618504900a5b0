"""Divisions of the same nodes: the intervals are the simulation's own, and Mooncake's figure comes out near 1:1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest

from benchmarks import plan_ratio
from kvbaton.plan.link import LinkModel
from kvbaton.plan.pool_ratio import Division, Limits, divide, last_standing, plateau, prefill_share
from kvbaton.plan.published import MOONCAKE_FIGURE_15
from kvbaton.plan.sim import simulate
from kvbaton.plan.sim_spec import FleetSpec, HandoffSpec, PoolSpec, WorkerSpec
from kvbaton.plan.step_time import StepModel
from kvbaton.plan.workload import Trace, TraceRequest, read_trace, synthetic
from kvbaton.router.policy import PolicyConfig
from kvbaton.types import LocalError

Shared = Callable[[str], Path]
STEP = StepModel(0.010, 100e-6, 2e-9, 1e-3, 1e-7, source="test")
WORKER = WorkerSpec(step=STEP, num_blocks=2_000, block_size=16, max_running=16)
HANDOFF = HandoffSpec(LinkModel(1e-3, 1e9), 20_000, 30)
HALVED = FleetSpec((PoolSpec("prefill", 2, WORKER), PoolSpec("decode", 2, WORKER)), HANDOFF, PolicyConfig(0))
WIDE = Limits(1e3, 1e3)


def test_intervals_are_those_of_the_simulation() -> None:
    """Of ten intervals or fewer the longest tenth is the longest one, which the simulation counts by itself."""
    trace = synthetic(60, 8.0, (600, 8), Random(3), spread=0.5)
    result = simulate(HALVED, trace)
    found = divide(HALVED, 2, trace, WIDE)
    assert found.effective == 1.0
    assert found.mean_ttft_s == pytest.approx(result.ttft.mean)
    longest = max(result.max_gap_s, result.tpot.p99)
    assert result.tpot.mean < found.mean_tbt_s <= longest
    one = Trace("one", (TraceRequest(0.0, 600, 9),))
    assert divide(HALVED, 2, one, WIDE).mean_tbt_s == pytest.approx(simulate(HALVED, one).max_gap_s, rel=1e-3)


def test_a_limit_cuts_where_it_lies() -> None:
    trace = synthetic(60, 8.0, (600, 8), Random(3), spread=0.5)
    ttft = sorted(simulate(HALVED, trace).ttft_s)
    limit_s = (ttft[29] + ttft[30]) / 2
    assert divide(HALVED, 2, trace, Limits(limit_s, 1e3)).effective == pytest.approx(0.5)
    assert divide(HALVED, 2, trace, Limits(1e3, 1e-3)).effective == 0.0


def test_the_plateau_and_its_middle() -> None:
    found = [Division(n, 8 - n, share, 0.0, 0.0) for n, share in ((2, 0.5), (3, 0.985), (4, 0.99), (5, 0.99), (6, 0.7))]
    assert [each.prefill for each in plateau(found)] == [3, 4, 5]
    assert prefill_share(found) == 0.5


def test_raising_the_rate_leaves_one_division_and_finds_its_rate() -> None:
    def at(count: int, rate: float) -> Division:
        return Division(count, 8 - count, 1.0 if rate <= 5.0 + (count == 4) else 0.0, 0.0, 0.0)

    rate, best = last_standing(at, range(1, 8), 0.7, 0.9, precision=0.01)
    assert 5.9 < rate <= 6.0
    assert best.prefill == 4
    with pytest.raises(LocalError, match="no division"):
        last_standing(lambda count, rate: Division(count, 1, 0.0, 0.0, 0.0), (1, 2), 1.0, 0.9)


def test_what_one_node_computed_another_loads_from_the_pool() -> None:
    tiered = msgspec.structs.replace(WORKER, num_blocks=60, tier_blocks=200, tier_s_per_token=1e-7)
    pools = (PoolSpec("prefill", 2, tiered), PoolSpec("decode", 1, WORKER))
    trace = Trace("twice", tuple(TraceRequest(5.0 * n, 512, 2, tuple(range(32))) for n in range(2)), block_tokens=16)
    found = [
        simulate(
            FleetSpec(pools, HANDOFF, PolicyConfig(0, kind="round_robin"), pooled_tier=pooled), trace
        ).cached_tokens
        for pooled in (False, True)
    ]
    assert found == [0, 31 * 16]


@pytest.mark.slow
def test_mooncake_synthetic_is_near_one_to_one_as_its_engine_decodes(shared: Shared) -> None:
    """Two constants from two of the printed TBT means; the shares of requests within the limits are foretold."""
    trace = read_trace(shared("mooncake-fast25") / "synthetic_trace.jsonl")
    fleet = plan_ratio.nodes()
    step = plan_ratio.fit(fleet, trace)
    counts = [row.prefill for row in MOONCAKE_FIGURE_15]
    found = plan_ratio.sweep(plan_ratio.with_step(fleet, step), trace, counts)
    by_count = {each.prefill: each for each in found}
    best = max(found, key=lambda each: each.effective)
    assert abs(best.prefill - best.decode) <= 2  # 7:9, 8:8 or 9:7
    assert abs(prefill_share(found) - 0.5) <= 1.5 / plan_ratio.NODES
    for count in (5, 11):  # both ends lose requests, as printed, and for the reason printed
        assert by_count[count].effective < best.effective - 0.03
    assert by_count[5].mean_ttft_s > 4 * by_count[8].mean_ttft_s
    assert by_count[11].mean_tbt_s > 1.4 * by_count[8].mean_tbt_s
    for row in MOONCAKE_FIGURE_15:
        if 7 <= row.prefill <= 10:  # not fitted to any TTFT, nor to any share
            assert by_count[row.prefill].effective == pytest.approx(row.effective, abs=0.05)
            assert by_count[row.prefill].mean_ttft_s == pytest.approx(row.mean_ttft_s, rel=0.2)
        if row.prefill >= 6:  # fitted at 8 and 11
            assert by_count[row.prefill].mean_tbt_s == pytest.approx(row.mean_tbt_s, rel=0.05)
    # Milliseconds for each decoding sequence, where the round constants have microseconds: that is what makes it 1:1.
    assert step.per_sequence_s > 100 * fleet.pools[0].worker.step.per_sequence_s
    plain = plan_ratio.sweep(fleet, trace, [8, 10])
    assert plain[1].mean_tbt_s < 0.03
    assert plain[1].effective >= plain[0].effective - 0.01
