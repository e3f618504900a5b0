"""Formulas that need no simulation: queues, pool ratios, capacities, and what tokens cost.

Each is the reference the simulator is tested against, or the first guess the search starts from. Knows no models.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, isfinite

import msgspec

from kvbaton.plan.kv_math import Sharding
from kvbaton.types import LocalError


def md1_wait_s(rate_per_s: float, service_s: float) -> float:
    """Mean wait in a queue with Poisson arrivals and one server of constant service time (excluding service)."""
    load = rate_per_s * service_s
    return load * service_s / (2.0 * (1.0 - load)) if load < 1.0 else float("inf")


def mg1_wait_s(rate_per_s: float, mean_s: float, second_moment_s2: float) -> float:
    """Pollaczek and Khinchine: the same with any service time."""
    load = rate_per_s * mean_s
    return rate_per_s * second_moment_s2 / (2.0 * (1.0 - load)) if load < 1.0 else float("inf")


def distserve_ttft_s(rate_per_s: float, prefill_s: float, pipeline: int = 1, speedup: float = 1.0) -> float:
    """Mean TTFT of one prefill instance over ``pipeline`` stages, or faster by ``speedup`` through tensor parallelism.

    With stages the latency stays and the bottleneck stage takes 1/pipeline of it; with tensor parallelism both shrink.
    """
    service_s = prefill_s / speedup
    return service_s + md1_wait_s(rate_per_s, service_s / pipeline)


class PoolRatio(msgspec.Struct, frozen=True):
    prefill: int
    decode: int
    rate_per_worker: float  # requests a second for each worker of both pools
    bottleneck: str


def pool_rate(prefill: int, decode: int, prefill_rate: float, decode_rate: float) -> PoolRatio:
    """What ``prefill`` and ``decode`` workers of the given goodputs carry together."""
    supply = {"prefill": prefill * prefill_rate, "decode": decode * decode_rate}
    bottleneck = min(supply, key=lambda name: supply[name])
    if abs(supply["prefill"] - supply["decode"]) < 1e-9 * supply["prefill"]:
        bottleneck = "balanced"
    return PoolRatio(prefill, decode, min(supply.values()) / (prefill + decode), bottleneck)


def best_ratio(prefill_rate: float, decode_rate: float, max_workers: int) -> PoolRatio:
    """The pool sizes, together at most ``max_workers``, that carry most for each worker; the smaller pool on a tie."""
    if max_workers < 2:
        raise LocalError("a split needs at least two workers", field="max_workers")
    options = (
        pool_rate(prefill, total - prefill, prefill_rate, decode_rate)
        for total in range(2, max_workers + 1)
        for prefill in range(1, total)
    )
    return max(options, key=lambda each: (round(each.rate_per_worker, 9), -each.prefill - each.decode))


def workers_for(rate_per_s: float, worker_rate: float, headroom: float = 0.0) -> int:
    """ceil(rate / goodput), with ``headroom`` kept free for variance."""
    if worker_rate <= 0 or not isfinite(worker_rate):
        raise LocalError(f"a worker's goodput must be positive, got {worker_rate}", field="goodput")
    return max(1, ceil(rate_per_s * (1.0 + headroom) / worker_rate - 1e-9))


class Capacity(msgspec.Struct, frozen=True):
    rate_per_s: float
    num_gpus: int
    bottleneck: str
    terms: Mapping[str, float]
    layout: str

    @property
    def rate_per_gpu(self) -> float:
        return self.rate_per_s / self.num_gpus


class PhaseWorkers(msgspec.Struct, frozen=True):
    """Workers of one phase. ``batch`` and ``latency_s`` bound what queue-corrected latency allows."""

    sharding: Sharding
    workers: int
    rate_per_worker: float
    batch: int | None = None
    latency_s: float | None = None


def capacity(prefill: PhaseWorkers, decode: PhaseWorkers) -> Capacity:
    """Requests a second of a fleet: the smallest of raw prefill, prefill at its queue-corrected latency, and decode.

    A TTFT that includes queueing and a capacity that does not would contradict each other, so both bounds count.
    """
    terms = {
        "prefill_raw": prefill.workers * prefill.rate_per_worker,
        "decode": decode.workers * decode.rate_per_worker,
    }
    if prefill.batch is not None and prefill.latency_s is not None:
        terms["prefill_at_latency"] = prefill.batch * prefill.workers / prefill.latency_s
    name = min(terms, key=lambda key: terms[key])
    gpus = sum(each.workers * each.sharding.num_gpus for each in (prefill, decode))
    layout = " + ".join(
        f"{label} {each.workers} x ({each.sharding.label})"
        for label, each in (("prefill", prefill), ("decode", decode))
    )
    return Capacity(terms[name], gpus, name.split("_")[0], terms, layout)


def cost_per_million_usd(num_gpus: float, usd_per_gpu_hour: float, tokens_per_s: float) -> float:
    """Price of a million tokens at that rate."""
    if tokens_per_s <= 0:
        return float("inf")
    return num_gpus * usd_per_gpu_hour / 3600.0 / tokens_per_s * 1e6
