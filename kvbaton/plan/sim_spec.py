"""What is simulated: workers, pools, the hand-off, and what goes wrong on purpose.

Both arms of a comparison are a ``FleetSpec``; a colocated one just has no hand-off. Knows nothing about time or traces.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvbaton.plan.autoscale_sim import Scaler
from kvbaton.plan.link import LinkModel
from kvbaton.plan.sim_host import SharedCores
from kvbaton.plan.step_time import StepModel
from kvbaton.router.policy import PolicyConfig
from kvbaton.types import LocalError, Role


class WorkerSpec(msgspec.Struct, frozen=True):
    """One worker: how fast, how much cache, and the limits its scheduler works under."""

    step: StepModel
    num_blocks: int
    block_size: int = 16
    max_batch_tokens: int = 2048  # the chunk budget
    max_running: int = 256
    max_context: int = 1 << 20
    max_chunk_tokens: int | None = None
    prefix_caching: bool = True
    mixed_batches: bool = True  # False: prefill chunks and decodes of one plan run one after the other
    num_gpus: int = 1
    tier_blocks: int = 0  # of a cache tier in host memory; 0: there is none
    tier_s_per_token: float = 0.0  # to load from it

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_batch_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise LocalError(f"{name} must be at least 1, got {getattr(self, name)}", field=name)


class PoolSpec(msgspec.Struct, frozen=True):
    role: Role
    count: int
    worker: WorkerSpec

    @property
    def num_gpus(self) -> int:
        return self.count * self.worker.num_gpus


class HandoffSpec(msgspec.Struct, frozen=True):
    """How KV moves. Each worker has its own link in and out; ``shared_link`` is one all of them go through as well."""

    link: LinkModel
    token_bytes: int  # distinct bytes of one token
    num_layers: int
    fixed_bytes: int = 0  # constant state of one sequence
    layer_wise: bool = True
    shared_link: LinkModel | None = None
    control_s: float = 0.0  # one message between router and worker, or worker and worker
    reserves_between_steps: bool = False  # the decode side finds room only when its step is over, then asks for prefill


class FleetSpec(msgspec.Struct, frozen=True):
    pools: tuple[PoolSpec, ...]
    handoff: HandoffSpec | None = None
    policy: PolicyConfig = PolicyConfig(threshold_tokens=64)
    admission_s: float = 0.0  # from the client's send to a scheduler's queue: parsing, tokenizing, routing
    kv_lag_s: float = 0.05  # from a change of a worker's cache until the router knows of it
    shared_cores: SharedCores | None = None  # all workers, the router and the clients run on one machine's cores
    pooled_tier: bool = False  # the cache tiers of all workers are one store that each of them loads from
    max_queued: int = 1_000_000  # requests the router holds while no worker has room; above it they are refused

    def __post_init__(self) -> None:
        roles = {pool.role for pool in self.pools if pool.count}
        if "prefill" in roles and self.handoff is None:
            raise LocalError("a prefill pool needs a hand-off", field="handoff", fix="say how KV moves")
        if not roles & {"decode", "both"}:
            raise LocalError("nobody decodes", field="pools", fix="add a decode or a colocated pool")

    @property
    def num_gpus(self) -> int:
        return sum(pool.num_gpus for pool in self.pools)

    def slower(self, factor: float) -> FleetSpec:
        """The same fleet on a machine that takes ``factor`` times as long for everything, of either arm alike."""
        replace, cores, handoff = msgspec.structs.replace, self.shared_cores, self.handoff
        if cores is not None:
            waits = {name: getattr(cores, name) * factor for name in ("token_s", "worker_wait_s", "full_wait_s")}
            cores = replace(cores, **waits)
        if handoff is not None:
            handoff = replace(handoff, link=handoff.link.slower(factor), control_s=handoff.control_s * factor)
        pools = tuple(
            replace(pool, worker=replace(pool.worker, step=pool.worker.step.slower(factor))) for pool in self.pools
        )
        admission_s = self.admission_s * factor
        return replace(self, pools=pools, handoff=handoff, shared_cores=cores, admission_s=admission_s)

    @property
    def split(self) -> bool:
        return any(pool.role == "prefill" and pool.count for pool in self.pools)

    @property
    def label(self) -> str:
        names = {"prefill": "prefill", "decode": "decode", "both": "colocated"}
        return " + ".join(f"{pool.count} {names[pool.role]}" for pool in self.pools if pool.count)


class Outage(msgspec.Struct, frozen=True):
    """A worker dies at ``at_s`` and its replacement, empty, takes requests ``down_s`` later."""

    worker: str  # pool role and index, as prefill-0
    at_s: float
    down_s: float


class Scaling(msgspec.Struct, frozen=True):
    """Pools that grow and shrink, decided every ``interval_s`` by a scaler made anew for each run."""

    scaler: Callable[[], Scaler]
    interval_s: float = 15.0
    startup_s: float = 60.0  # from the decision until the worker takes requests; its GPUs are paid from the decision


class Incidents(msgspec.Struct, frozen=True):
    outages: tuple[Outage, ...] = ()
    scaling: Scaling | None = None
    give_up_s: float | None = None  # clients leave when no first token came for so long
