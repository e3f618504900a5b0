"""Workers on shared cores: nobody is slowed while a core is free, everybody alike when none is, in either arm."""

from __future__ import annotations

import pytest

from kvbaton.plan.link import LinkModel
from kvbaton.plan.sim import simulate
from kvbaton.plan.sim_host import SharedCores, SharedMachine
from kvbaton.plan.sim_spec import FleetSpec, HandoffSpec, PoolSpec, WorkerSpec
from kvbaton.plan.step_time import StepModel
from kvbaton.plan.workload import Trace, TraceRequest
from kvbaton.router.policy import PolicyConfig

STEP = StepModel(0.010, 100e-6, 0.0, 100e-6, 0.0, source="test")
WORKER = WorkerSpec(step=STEP, num_blocks=200, block_size=16, max_batch_tokens=512, max_running=8)
CORES = SharedCores(num_cores=2, slowdown=0.1, token_s=1e-3, full_wait_s=0.004)


def pair(cores: SharedCores | None) -> FleetSpec:
    return FleetSpec((PoolSpec("both", 2, WORKER),), policy=PolicyConfig(kind="round_robin"), shared_cores=cores)


def at(*arrivals_s: float, output: int = 50) -> Trace:
    return Trace("given", tuple(TraceRequest(each, 20, output) for each in arrivals_s))


def test_a_step_beside_others_is_what_the_rows_say() -> None:
    machine = SharedMachine(CORES)
    assert machine.step_s("a", 0.020, 4) == 0.020
    assert not machine.full
    assert machine.router_wait_s == 0.0
    beside_s = machine.step_s("b", 0.020, 4)
    assert beside_s == pytest.approx(0.020 * 1.1 + 4 * 1e-3)  # the row that the constants are fitted to
    assert machine.router_wait_s == 0.004
    machine.idle("a")
    assert machine.step_s("b", 0.020, 4) == 0.020


def test_beside_a_worker_that_computes_prompts_a_step_takes_longer_still() -> None:
    machine = SharedMachine(SharedCores(num_cores=2, slowdown=0.1, prefill_slowdown=0.5))
    machine.step_s("a", 0.100, 0, prefill=True)
    assert machine.step_s("b", 0.020, 0) == pytest.approx(0.030)
    assert machine.step_s("a", 0.100, 0, prefill=True) == pytest.approx(0.110)  # b decodes
    machine.step_s("a", 0.100, 0)
    assert machine.step_s("b", 0.020, 0) == pytest.approx(0.022)


def test_one_stream_alone_is_not_slowed_and_two_are() -> None:
    alone = simulate(pair(None), at(0.0))
    assert simulate(pair(CORES), at(0.0)).tpot_s == pytest.approx(alone.tpot_s)
    both, free = simulate(pair(CORES), at(0.0, 0.0)), simulate(pair(None), at(0.0, 0.0))
    assert both.tpot.p50 == pytest.approx(free.tpot.p50 * 1.1 + 1e-3, rel=0.03)
    assert free.tpot.p50 == pytest.approx(alone.tpot.p50)


@pytest.mark.parametrize(("cores", "before"), [
    (SharedCores(num_cores=2, full_wait_s=0.1), (0.0, 0.0)),  # both cores are busy
    (SharedCores(num_cores=9, worker_wait_s=0.1), (0.0, 0.0)),  # the worker it is sent to is, and cores are free
])  # fmt: skip
def test_who_comes_while_others_compute_waits_to_be_heard(cores: SharedCores, before: tuple[float, ...]) -> None:
    late = at(*before, 0.1)
    assert simulate(pair(cores), late).ttft_s[-1] == pytest.approx(
        simulate(pair(None), late).ttft_s[-1] + 0.1, abs=0.012
    )
    assert simulate(pair(cores), at(0.0)).ttft_s == simulate(pair(None), at(0.0)).ttft_s


def test_nobody_waits_for_an_idle_worker_beside_a_busy_one() -> None:
    cores = SharedCores(num_cores=2, full_wait_s=0.1, worker_wait_s=0.1)
    late = at(0.0, 0.1)  # in turn, so to the other worker
    assert simulate(pair(cores), late).ttft_s == pytest.approx(simulate(pair(None), late).ttft_s)


def test_the_constants_are_the_same_for_a_split() -> None:
    """A prefill worker that is busy slows the decode worker as a second colocated one would; an idle one does not."""
    handoff = HandoffSpec(LinkModel(1e-4, 1e10), 20_000, 30)
    pools = (PoolSpec("prefill", 1, WORKER), PoolSpec("decode", 1, WORKER))
    cores = SharedCores(num_cores=2, slowdown=0.1, prefill_slowdown=0.5, token_s=1e-3)
    shared, apart = (
        FleetSpec(pools, handoff, PolicyConfig(threshold_tokens=0), shared_cores=each) for each in (cores, None)
    )
    one = at(0.0)
    assert simulate(shared, one).tpot_s == pytest.approx(simulate(apart, one).tpot_s)
    steady = Trace("prompts", (TraceRequest(0.0, 20, 100), *(TraceRequest(0.02 * n, 1500, 1) for n in range(1, 80))))
    slowed, free = simulate(shared, steady).tpot_s[0], simulate(apart, steady).tpot_s[0]
    # Some of its steps are beside a prompt, and its one token a step is shared between two busy cores.
    prefill_share = simulate(apart, steady).pools[0].prefill_share
    assert free * 1.01 < slowed < free * 1.5 + 1e-3
    assert prefill_share > 0.5


def test_a_decode_worker_that_reserves_between_steps_delays_the_prompt_by_the_rest_of_its_step() -> None:
    slow = WorkerSpec(step=StepModel(0.5, 0.0, source="test"), num_blocks=200, max_running=8)
    pools = (PoolSpec("prefill", 1, WORKER), PoolSpec("decode", 1, slow))
    trace = at(0.0, 0.7)
    found = []
    for waits in (False, True):
        handoff = HandoffSpec(LinkModel(0.0, 1e12), 1, 1, reserves_between_steps=waits)
        found.append(simulate(FleetSpec(pools, handoff, PolicyConfig(threshold_tokens=0)), trace).ttft_s)
    first_token_s = found[0][0]
    assert found[1][0] == first_token_s  # nobody decoded yet
    step_over_s = first_token_s + 2 * 0.5  # decode steps begin when the first prompt has landed
    assert found[1][1] - found[0][1] == pytest.approx(step_over_s - 0.7, abs=1e-6)
