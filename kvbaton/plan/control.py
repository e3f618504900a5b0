"""How many workers a pool should have now: the autoscaling decision, as a pure function.

Load is work, not utilisation: the queue counts (waiting tokens over what the pool computes a second), so a standing
queue is a violation even when each step is fast; no traffic is a load of zero, never a missing number. A dead band and
a wait before shrinking keep a few percent of noise from moving the target.

Knows nothing about who starts workers, or about Kubernetes.
"""

from __future__ import annotations

from math import ceil

import msgspec

from kvbaton.types import LocalError


class ScalingPolicy(msgspec.Struct, frozen=True):
    minimum: int = 1
    maximum: int = 64
    target_load: float = 0.7  # of what the pool can do
    dead_band: float = 0.1  # loads this near the target change nothing
    shrink_after_s: float = 300.0  # the target must have been lower for so long
    max_wait_s: float = 1.0  # a queue that takes longer than this to work off counts as a violation

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise LocalError("1 <= minimum <= maximum is needed", field="scaling.minimum")
        if not 0 < self.target_load < 1:
            raise LocalError("target_load lies between 0 and 1", field="scaling.target_load")


class PoolLoad(msgspec.Struct, frozen=True):
    """What a pool did over the last interval."""

    workers: int  # serving and starting
    busy_share: float  # of the serving workers' time; 0 without traffic
    wait_s: float  # time to work off what waits, at the pool's speed; 0 when nothing waits


class ScalingState(msgspec.Struct, frozen=True):
    """What must be remembered between decisions."""

    low_since_s: float | None = None


class ScalingDecision(msgspec.Struct, frozen=True):
    workers: int
    state: ScalingState
    reason: str


def decide(policy: ScalingPolicy, load: PoolLoad, state: ScalingState, now_s: float) -> ScalingDecision:
    """The number of workers wanted, and why."""
    busy = load.busy_share if load.busy_share == load.busy_share else 0.0  # a NaN average means no traffic
    demand = load.workers * busy / policy.target_load
    if load.wait_s > policy.max_wait_s:
        demand = max(demand, load.workers * min(2.0, load.wait_s / policy.max_wait_s))
    wanted = min(policy.maximum, max(policy.minimum, ceil(demand - 1e-9)))
    if wanted > load.workers:
        queued = load.wait_s > policy.max_wait_s
        if not queued and busy <= policy.target_load * (1.0 + policy.dead_band):
            return ScalingDecision(load.workers, ScalingState(), "within the dead band")
        reason = f"the queue takes {load.wait_s:.1f} s" if queued else f"load {busy:.2f} is above the target"
        return ScalingDecision(wanted, ScalingState(), reason)
    if wanted == load.workers:
        return ScalingDecision(wanted, ScalingState(), "enough")
    # One worker less must still be below the target by the band, else it would come back at once.
    if load.workers * busy > (load.workers - 1) * policy.target_load * (1.0 - policy.dead_band):
        return ScalingDecision(load.workers, ScalingState(), "within the dead band")
    low_since_s = state.low_since_s if state.low_since_s is not None else now_s
    if now_s - low_since_s < policy.shrink_after_s:
        return ScalingDecision(load.workers, ScalingState(low_since_s), "low, but not for long enough")
    return ScalingDecision(load.workers - 1, ScalingState(low_since_s), f"load {busy:.2f} has been low long enough")
