"""The cost model in the simulator: exact costs foretell what the simulated fleet does, and routing by them pays."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest

from kvbaton.plan.link import LinkModel
from kvbaton.plan.sim import Simulation, simulate
from kvbaton.plan.sim_costs import exact_costs, worker_cost
from kvbaton.plan.sim_result import SimResult
from kvbaton.plan.sim_spec import FleetSpec, HandoffSpec, PoolSpec, WorkerSpec
from kvbaton.plan.step_time import StepModel
from kvbaton.plan.workload import Trace, TraceRequest, synthetic
from kvbaton.router.cost import FleetCosts, WorkerCost, locals_, pairs
from kvbaton.router.policy import PolicyConfig
from kvbaton.router.views import MemberView, RequestView

STEP = StepModel(0.008, 40e-6, 1e-9, 15e-6, 0.05e-6)
WORKER = WorkerSpec(STEP, 8_000, 16, max_batch_tokens=512, max_running=64)
HANDOFF = HandoffSpec(LinkModel(1e-3, 1e10), token_bytes=100_000, num_layers=32, control_s=0.0005)


def split(prefill: int, decode: int, handoff: HandoffSpec = HANDOFF, **policy: Any) -> FleetSpec:
    pools = (PoolSpec("prefill", prefill, WORKER), PoolSpec("decode", decode, WORKER))
    return FleetSpec(pools, handoff, PolicyConfig(**policy), admission_s=0.002)


def colocated(count: int, **policy: Any) -> FleetSpec:
    return FleetSpec((PoolSpec("both", count, WORKER),), policy=PolicyConfig(**policy))


@pytest.mark.parametrize("tokens", [30, 512, 1_500, 6_000])
def test_an_idle_fleet_does_what_was_estimated(tokens: int) -> None:
    """One request alone, either way: TTFT as foretold, within what the form leaves out (a chunk that is not full)."""
    trace = Trace("one", (TraceRequest(0.0, tokens, 50),))
    view, limits = RequestView(tokens, 1, tokens, tokens + 50), PolicyConfig().limits
    members = [MemberView(f"{r}-0", r, 0, 0, 1 << 20) for r in ("prefill", "decode")]  # type: ignore[arg-type]
    for threshold in (0, 10**9):
        fleet = split(1, 1, threshold_tokens=threshold)
        costs = exact_costs(fleet, {"prefill-0": WORKER, "decode-0": WORKER}, 50)
        here, away = locals_(view, members[1:], costs, limits), pairs(view, members[:1], members[1:], costs, limits)
        estimate = (away if threshold == 0 else here)[0]
        result = simulate(fleet, trace)
        assert result.ttft_s[0] == pytest.approx(estimate.ttft_s, rel=0.02)
        if threshold == 0:
            assert result.exposed_s[0] == pytest.approx(estimate.exposed_s + HANDOFF.control_s, abs=0.004)


def test_experts_are_read_by_chunks_and_by_steps_as_far_as_they_are_touched() -> None:
    step = msgspec.structs.replace(STEP, expert_read_s=0.01, expert_share=0.05)
    found = worker_cost(msgspec.structs.replace(WORKER, step=step))
    assert found.prefill_fixed_s == pytest.approx(0.018)
    assert 0.008 < found.step_fixed_s < 0.018


def test_routing_by_cost_is_no_worse_than_the_best_threshold() -> None:
    """Whatever the threshold, in a fleet where too much of either hurts: the break-even needs no tuning."""
    trace = synthetic(400, 9.0, (900, 120), Random(3), spread=1.2)
    handoff = msgspec.structs.replace(HANDOFF, link=LinkModel(5e-3, 1e9))
    cost = simulate(split(1, 2, handoff), trace)
    statics = [simulate(split(1, 2, handoff, threshold_tokens=n), trace) for n in (0, 256, 1_024, 4_096, 10**9)]
    assert cost.outcomes == {"ok": 400}
    assert {"remote", "local_cheaper"} == set(cost.reasons)
    assert score(cost) <= 1.1 * min(score(each) for each in statics)
    assert score(cost) < 0.7 * max(score(each) for each in statics)


def score(result: SimResult) -> float:
    """TTFT and TPOT in shares of their limits, as the cost weighs them."""
    return result.ttft.mean / 2.0 + result.tpot.mean / 0.1


def hot(count: int, rate: float, seed: int = 4) -> Trace:
    """Every prompt begins with the same 2,000 tokens."""
    rng = Random(seed)
    requests = []
    for index, each in enumerate(synthetic(count, rate, (2_300, 30), rng, spread=0.05).requests):
        blocks = -(-each.prompt_tokens // 400)
        requests.append(
            msgspec.structs.replace(
                each, block_ids=tuple(n if n < 5 else 1_000 + index * 100 + n for n in range(blocks))
            )
        )
    return Trace("hot", tuple(requests), 400)


def test_a_hot_prefix_spreads_when_its_holder_saturates() -> None:
    """Case RT-09: one holder cannot serve them all, though all of them would hit there."""
    trace = hot(200, 60.0)
    run = Simulation(colocated(4), trace)
    result = run.run()
    placed = Counter(each.decode for each in run.records.values())
    assert result.outcomes == {"ok": 200}
    assert max(placed.values()) / (200 / 4) <= 1.5
    least = simulate(colocated(4, kind="least_load"), trace)
    assert result.ttft.p99 <= least.ttft.p99 * 1.02


def test_a_hot_prefix_stays_where_it_is_while_there_is_room() -> None:
    trace = hot(60, 1.0)
    run = Simulation(colocated(4), trace)
    run.run()
    assert len({each.decode for each in run.records.values()}) == 1


def test_wrong_beliefs_route_wrong() -> None:
    """What the router believes is an argument: one that takes a worker for slow leaves it alone."""
    trace = synthetic(100, 4.0, (600, 40), Random(5))
    slow = FleetCosts({"both-0": WorkerCost(prefill_token_s=0.1)})
    run = Simulation(colocated(2), trace, costs=slow)
    run.run()
    placed = Counter(each.decode for each in run.records.values())
    assert placed["both-1"] == 100


def test_equal_runs_are_equal_bytes() -> None:
    trace = hot(80, 30.0)
    fleet = split(2, 2)
    assert simulate(fleet, trace).encode() == simulate(fleet, trace).encode()
