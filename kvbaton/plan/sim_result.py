"""What a run showed: latencies of each request, percentiles, use of workers and links.

Only requests that ended well count into latencies; the others are counted by how they ended. Knows nothing about SLOs
beyond attainment for a given pair. Encoded results of equal runs are equal bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvbaton.plan.sim_record import GapHistogram, Record
from kvbaton.plan.sim_spec import FleetSpec
from kvbaton.router.lifecycle import State

if TYPE_CHECKING:
    from kvbaton.plan.sim_incidents import Fleet


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: np.ndarray) -> Percentiles:
        if not values.size:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (float(np.percentile(values, share)) for share in (50, 90, 99))
        return cls(float(values.mean()), p50, p90, p99)


class PoolUse(msgspec.Struct, frozen=True):
    role: str
    workers: int
    gpu_seconds: float
    prefill_share: float  # of worker time
    decode_share: float
    peak_block_share: float  # of the fullest worker's cache blocks in use at once
    link_share: float  # of worker time its outgoing link was busy
    preemptions: int


class SimResult(msgspec.Struct, frozen=True):
    label: str
    num_requests: int
    outcomes: dict[str, int]
    reasons: dict[str, int]
    span_s: float  # from the first arrival to the last token
    ttft_s: tuple[float, ...]  # of requests that ended well, in order of arrival
    tpot_s: tuple[float, ...]  # of those with more than one token
    e2e_s: tuple[float, ...]
    paired: tuple[tuple[float, float], ...]  # TTFT and TPOT (0 for one token) of each, for attainment
    exposed_s: tuple[float, ...]
    p99_gap_s: float
    max_gap_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    wire_bytes: int
    pools: tuple[PoolUse, ...]

    @property
    def ttft(self) -> Percentiles:
        return Percentiles.of(np.array(self.ttft_s))

    @property
    def tpot(self) -> Percentiles:
        return Percentiles.of(np.array(self.tpot_s))

    @property
    def e2e(self) -> Percentiles:
        return Percentiles.of(np.array(self.e2e_s))

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.span_s if self.span_s else 0.0

    @property
    def gpu_seconds(self) -> float:
        return sum(pool.gpu_seconds for pool in self.pools)

    @property
    def token_hit(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def attainment(self, ttft_s: float, tpot_s: float) -> float:
        """Share of all requests that ended well within both limits."""
        good = sum(ttft <= ttft_s and tpot <= tpot_s for ttft, tpot in self.paired)
        return good / self.num_requests if self.num_requests else 0.0

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def collect(spec: FleetSpec, records: Iterable[Record], fleet: Fleet, gaps: GapHistogram, end_s: float,
            wire_bytes: int) -> SimResult:  # fmt: skip
    everyone = list(records)
    done = [record for record in everyone if record.lifecycle.state is State.DONE]
    ttft = [record.ttft_s or 0.0 for record in done]
    tpot = [record.tpot_s for record in done]
    first_s = min((record.arrival_s for record in everyone), default=0.0)
    last_s = max((record.finish_s or 0.0 for record in done), default=end_s)
    return SimResult(
        label=spec.label,
        num_requests=len(everyone),
        outcomes=dict(sorted(Counter(record.lifecycle.outcome for record in everyone).items())),
        reasons=dict(sorted(Counter(record.reason for record in everyone).items())),
        span_s=max(0.0, last_s - first_s),
        ttft_s=tuple(ttft),
        tpot_s=tuple(each for each in tpot if each is not None),
        e2e_s=tuple((record.finish_s or 0.0) - record.arrival_s for record in done),
        paired=tuple((first, each or 0.0) for first, each in zip(ttft, tpot, strict=True)),
        exposed_s=tuple(record.exposed_s for record in done if record.prefill is not None),
        p99_gap_s=gaps.percentile(0.99),
        max_gap_s=max((record.max_gap_s for record in done), default=0.0),
        prompt_tokens=sum(record.prompt_tokens for record in done),
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=sum(record.output_tokens for record in done),
        wire_bytes=wire_bytes,
        pools=_pools(spec, fleet, first_s, max(last_s, first_s)),
    )


def _pools(spec: FleetSpec, fleet: Fleet, first_s: float, last_s: float) -> tuple[PoolUse, ...]:
    uses = []
    for pool in spec.pools:
        workers = [worker for worker in fleet.workers.values() if worker.role == pool.role]
        if not workers:
            continue
        lives = [(worker.gone_s or last_s) - max(worker.born_s, first_s) for worker in workers]
        worker_s = max(sum(lives), 1e-9)
        peak = max(worker.peak_blocks for worker in workers)
        uses.append(
            PoolUse(
                role=pool.role,
                workers=len(workers),
                gpu_seconds=worker_s * pool.worker.num_gpus,
                prefill_share=sum(worker.prefill_busy_s for worker in workers) / worker_s,
                decode_share=sum(worker.decode_busy_s for worker in workers) / worker_s,
                peak_block_share=peak / pool.worker.num_blocks,
                link_share=sum(worker.link_busy_s for worker in workers) / worker_s,
                preemptions=sum(worker.num_preemptions for worker in workers),
            )
        )
    return tuple(uses)
