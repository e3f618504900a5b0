"""The cost models of a simulated fleet, exact as far as their form allows: what a live router would have learned.

The router's form has no experts and no shared links: experts count as read in full by every chunk, and by a step as far
as a batch of 16 reads them. Knows nothing about requests.
"""

from __future__ import annotations

from kvbaton.plan.sim_spec import FleetSpec, HandoffSpec, WorkerSpec
from kvbaton.router.cost import FleetCosts, LinkCost, WorkerCost

_TYPICAL_BATCH = 16


def worker_cost(spec: WorkerSpec) -> WorkerCost:
    step = spec.step
    read = step.expert_read_s * (1.0 - (1.0 - step.expert_share) ** _TYPICAL_BATCH)
    return WorkerCost(
        prefill_fixed_s=step.fixed_s + step.per_chunk_s + step.expert_read_s,
        prefill_token_s=step.per_token_s,
        prefill_pair_s=step.per_pair_s,
        step_fixed_s=step.fixed_s + read,
        step_sequence_s=step.per_token_s + step.per_sequence_s,
        step_context_s=step.per_context_s,
    )


def link_cost(handoff: HandoffSpec) -> LinkCost:
    rate = handoff.link.bytes_per_s
    if handoff.shared_link is not None:
        rate = min(rate, handoff.shared_link.bytes_per_s)
    return LinkCost(handoff.link.startup_s + handoff.control_s, 1.0 / rate)


def exact_costs(fleet: FleetSpec, names: dict[str, WorkerSpec], output_tokens: float) -> FleetCosts:
    """``names``: every worker of the fleet; ``output_tokens``: of a mean request."""
    costs = FleetCosts(
        workers={name: worker_cost(spec) for name, spec in names.items()},
        overhead_local_s=fleet.admission_s,
        overhead_remote_s=fleet.admission_s,
        output_tokens=max(1.0, output_tokens),
    )
    handoff = fleet.handoff
    if handoff is None:
        return costs
    return FleetCosts(
        workers=costs.workers,
        link=link_cost(handoff),
        token_bytes=handoff.token_bytes,
        num_layers=handoff.num_layers if handoff.layer_wise else 1,
        overhead_local_s=fleet.admission_s,
        overhead_remote_s=fleet.admission_s + handoff.control_s,
        output_tokens=costs.output_tokens,
    )
