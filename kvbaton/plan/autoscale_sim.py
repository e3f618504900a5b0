"""The autoscaler inside the simulator: reads simulated workers, asks ``control.decide``, says what changes.

A ``Scaler`` is anything that does so: rivals that are compared with ours (utilisation, a schedule that knows the trace)
have the same two methods' worth of power. Knows nothing about how workers start or drain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from kvbaton.plan.autoscale_demand import PoolSeen
from kvbaton.plan.autoscale_seen import PoolCounts, Watched, WorkerCounts, look
from kvbaton.plan.control import ScalingDecision, ScalingPolicy, ScalingState, decide
from kvbaton.types import LocalError, Role

if TYPE_CHECKING:
    from kvbaton.plan.sim_incidents import Fleet
    from kvbaton.plan.sim_worker import SimWorker


class Scaler(Protocol):
    def step(self, fleet: Fleet, now_s: float) -> Mapping[Role, int]:
        """Workers to start (above 0) or to drain (below 0) now, by pool."""
        ...


class PolicyScaler:
    """Ours. Keeps what the pure function wants remembered, and its decisions for those who look at them afterwards."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self._state = ScalingState()
        self._watched: dict[Role, Watched] = {}
        self.decisions: list[tuple[float, ScalingDecision]] = []

    def step(self, fleet: Fleet, now_s: float) -> Mapping[Role, int]:
        seen: dict[Role, PoolSeen] = {}
        for role in fleet.roles:
            counts = pool_counts(fleet, role)
            self._watched[role], seen[role] = look(counts, self._watched.get(role, Watched()), now_s)
        for role in self._policy.pools:
            if role not in seen:
                raise LocalError(f"no {role} pool to scale", field="scaling")
        decision = decide(self._policy, seen, self._state, now_s)
        self._state = decision.state
        self.decisions.append((now_s, decision))
        return {role: each.add - each.drain for role, each in decision.pools.items()}


def pool_counts(fleet: Fleet, role: Role) -> PoolCounts:
    members = fleet.members(role)
    draining = sum(fleet.is_draining(each) for each in members)
    serving = [each for each in members if each.accepting]
    return PoolCounts(
        workers={each.name: _counts(each) for each in serving},
        starting=len(members) - draining - len(serving),
        draining=draining,
        unrouted=float(fleet.num_unrouted()) if role != "prefill" else 0.0,
    )


def _counts(worker: SimWorker) -> WorkerCounts:
    scheduler, blocks = worker.scheduler, worker.blocks
    return WorkerCounts(
        waiting_prompt_tokens=scheduler.waiting_prompt_tokens,
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        receiving=scheduler.num_receiving,
        num_blocks=worker.spec.num_blocks,
        num_blocks_free=blocks.num_free,
        computed_tokens=worker.prefill_tokens,
        prefill_busy_s=worker.prefill_busy_s,
    )
