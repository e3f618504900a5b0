"""The simulated fleet's members over time: who takes requests, who is down, who is starting, who drains.

Scaling decisions are a scaler's (``autoscale_sim``); this module only carries them out.
Knows nothing about requests beyond how many a worker has.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbaton.plan.sim_host import SharedMachine
from kvbaton.plan.sim_index import SimIndex
from kvbaton.plan.sim_record import GapHistogram, Record
from kvbaton.plan.sim_spec import FleetSpec, Incidents, PoolSpec
from kvbaton.plan.sim_tier import HostStore
from kvbaton.plan.sim_worker import SimWorker
from kvbaton.router.policy import MemberView
from kvbaton.router.sent import pool_shares
from kvbaton.types import LocalError, Role


class Fleet:
    """All workers that ever were, by name."""

    def __init__(self, spec: FleetSpec, incidents: Incidents, records: dict[str, Record], gaps: GapHistogram) -> None:
        self._spec = spec
        self._incidents = incidents
        self._records = records
        self._gaps = gaps
        self.workers: dict[str, SimWorker] = {}
        tier_blocks = sum(pool.count * pool.worker.tier_blocks for pool in spec.pools)
        self._store = HostStore(tier_blocks) if spec.pooled_tier else None
        self.machine = SharedMachine(spec.shared_cores) if spec.shared_cores is not None else None
        self._draining: set[str] = set()
        self._scaler = incidents.scaling.scaler() if incidents.scaling is not None else None
        self.num_unrouted: Callable[[], int] = lambda: 0  # requests that wait at the router; the simulation knows
        for pool in spec.pools:
            for _ in range(pool.count):
                self._new(pool, 0.0)
        for outage in incidents.outages:
            if outage.worker not in self.workers:
                raise LocalError(f"no worker {outage.worker}", field="incidents.outages.worker")

    def _new(self, pool: PoolSpec, now_s: float) -> SimWorker:
        number = sum(worker.role == pool.role for worker in self.workers.values())
        worker = SimWorker(
            f"{pool.role}-{number}", pool.role, pool.worker, self._records, self._gaps, self._store, self.machine
        )
        worker.born_s = now_s
        self.workers[worker.name] = worker
        return worker

    def first_events(self) -> list[tuple[float, str, tuple]]:
        events: list[tuple[float, str, tuple]] = [
            (outage.at_s, "down", (self.workers[outage.worker], outage.down_s)) for outage in self._incidents.outages
        ]
        if self._incidents.scaling is not None:
            events.append((self._incidents.scaling.interval_s, "scale", ()))
        return events

    @property
    def anybody_to_come(self) -> bool:
        """Whether waiting can help: somebody serves, restarts or starts."""
        return any(worker.gone_s is None for worker in self.workers.values())

    def views(self, record: Record, index: SimIndex, now_s: float) -> list[MemberView]:
        """What the router sees."""
        asked = [w for w in self.workers.values() if w.accepting and w.name not in record.tried]
        cached = index.cached_tokens(record, asked, now_s)
        if not self._spec.policy.by_cost:  # rules look at less, and there are many requests
            return [
                MemberView(
                    worker.name, worker.role, len(worker.active), worker.scheduler.waiting_prompt_tokens,
                    worker.spec.max_context, cached[worker.name],
                    worker.blocks.num_used * worker.spec.block_size, worker.blocks.num_free * worker.spec.block_size,
                    worker.spec.max_batch_tokens, worker.spec.max_running,
                )
                for worker in asked
            ]  # fmt: skip
        busy = pool_shares([(worker.role, worker.sent) for worker in asked], now_s)
        return [
            MemberView(
                worker.name, worker.role, len(worker.active), queued := worker.scheduler.waiting_prompt_tokens,
                worker.spec.max_context, cached[worker.name],
                worker.blocks.num_used * worker.spec.block_size, worker.blocks.num_free * worker.spec.block_size,
                worker.spec.max_batch_tokens, worker.spec.max_running, 0.0,
                worker.sent.queued_pairs(queued), busy[worker.role], worker.sent.found_tokens_per_s(now_s),
            )
            for worker in asked
        ]  # fmt: skip

    @property
    def roles(self) -> list[Role]:
        return [pool.role for pool in self._spec.pools]

    def members(self, role: Role) -> list[SimWorker]:
        """All that are paid for: serving, starting, down and draining ones."""
        return [worker for worker in self.workers.values() if worker.role == role and worker.gone_s is None]

    def is_draining(self, worker: SimWorker) -> bool:
        return worker.name in self._draining

    def scale(self, now_s: float) -> tuple[float, list[tuple[float, SimWorker]]]:
        """Decide for each pool. Returns when to decide next, and who starts with the time they are ready."""
        scaling = self._incidents.scaling
        assert scaling is not None and self._scaler is not None
        started = []
        for role, change in self._scaler.step(self, now_s).items():
            pool = next(each for each in self._spec.pools if each.role == role)
            for _ in range(change):
                worker = self._new(pool, now_s)
                worker.accepting = False
                started.append((now_s + scaling.startup_s, worker))
            serving = sorted((w for w in self.members(role) if w.accepting), key=lambda w: (len(w.active), w.name))
            for worker in serving[: max(0, -change)]:
                worker.accepting = False
                self._draining.add(worker.name)
                self.retire_if_idle(worker, now_s)
        return now_s + scaling.interval_s, started

    def retire_if_idle(self, worker: SimWorker, now_s: float) -> None:
        """A draining worker goes when its last request is done."""
        if worker.name in self._draining and not worker.active and worker.gone_s is None:
            worker.gone_s = now_s
