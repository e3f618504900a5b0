"""The autoscaling decision: queues count, no traffic is no load, noise moves nothing (AS-03, AS-05, AS-06)."""

from __future__ import annotations

from random import Random

import pytest

from kvbaton.plan.control import PoolLoad, ScalingPolicy, ScalingState, decide
from kvbaton.types import LocalError

POLICY = ScalingPolicy(minimum=1, maximum=10, shrink_after_s=60.0)


def run(loads: list[PoolLoad], step_s: float = 15.0) -> list[int]:
    state, wanted = ScalingState(), []
    for number, load in enumerate(loads):
        decision = decide(POLICY, load, state, number * step_s)
        state = decision.state
        wanted.append(decision.workers)
    return wanted


def test_no_traffic_scales_in_to_the_minimum_as_03() -> None:
    workers, state = 7, ScalingState()
    for number in range(20):
        decision = decide(POLICY, PoolLoad(workers, float("nan"), 0.0), state, number * 15.0)
        workers, state = decision.workers, decision.state
    assert workers == 1


def test_a_standing_queue_grows_the_pool_though_steps_are_fast_as_05() -> None:
    decision = decide(POLICY, PoolLoad(2, 0.6, 30.0), ScalingState(), 0.0)
    assert decision.workers == 4
    assert "queue" in decision.reason


def test_noise_of_a_few_percent_moves_nothing_as_06() -> None:
    rng = Random(1)
    wanted = run([PoolLoad(4, 0.7 * (1 + rng.uniform(-0.05, 0.05)), 0.0) for _ in range(200)])
    assert set(wanted) == {4}


def test_shrinking_waits_and_goes_one_by_one() -> None:
    wanted = run([PoolLoad(4, 0.2, 0.0) for _ in range(8)])
    assert wanted == [4, 4, 4, 4, 3, 3, 3, 3]


def test_limits() -> None:
    assert decide(POLICY, PoolLoad(10, 1.0, 100.0), ScalingState(), 0.0).workers == 10
    with pytest.raises(LocalError):
        ScalingPolicy(minimum=5, maximum=2)
    with pytest.raises(LocalError):
        ScalingPolicy(target_load=1.5)
