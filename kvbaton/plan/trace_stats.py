"""What a trace looks like: rates, lengths, burstiness, and how much of its prompts a prefix cache would hold.

Percentiles interpolate linearly. Cache hits are counted in tokens of prompt blocks; a request's own blocks enter the
cache after it was looked up. Knows nothing about models or time models.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np

from kvbaton.plan.workload import Trace
from kvbaton.types import LocalError


class Lengths(msgspec.Struct, frozen=True):
    mean: float
    p10: float
    p50: float
    p90: float
    p99: float
    max: float


class TraceStats(msgspec.Struct, frozen=True):
    rows: int
    span_s: float
    rate_per_s: float
    gap_cv: float  # coefficient of variation of gaps between arrivals; 1 is Poisson
    min_minute_rate_per_s: float  # of whole minutes
    max_minute_rate_per_s: float
    prompt: Lengths
    output: Lengths
    prompt_per_output: float  # tokens in for each token out
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    token_hit: float | None  # infinite prefix cache; None where the trace has no block ids
    block_hit: float | None
    unique_blocks: int | None
    notes: tuple[str, ...] = ()


def lengths(values: np.ndarray) -> Lengths:
    p10, p50, p90, p99 = (float(np.percentile(values, q)) for q in (10, 50, 90, 99))
    return Lengths(float(values.mean()), p10, p50, p90, p99, float(values.max()))


def describe(trace: Trace) -> TraceStats:
    prompt = np.array([each.prompt_tokens for each in trace.requests])
    output = np.array([each.output_tokens for each in trace.requests])
    arrivals = np.array([each.arrival_s for each in trace.requests])
    gaps = np.diff(arrivals)
    span_s = trace.span_s
    minutes = np.bincount(((arrivals - arrivals[0]) // 60).astype(int))[: int(span_s // 60)] / 60
    token_hit = block_hit = unique = None
    if trace.block_tokens is not None:
        token_hit, block_hit, unique = cache_hits(trace, None)
    return TraceStats(
        rows=len(prompt),
        span_s=span_s,
        rate_per_s=trace.rate_per_s,
        gap_cv=float(gaps.std() / gaps.mean()) if gaps.size and gaps.mean() else 0.0,
        min_minute_rate_per_s=float(minutes.min()) if minutes.size else trace.rate_per_s,
        max_minute_rate_per_s=float(minutes.max()) if minutes.size else trace.rate_per_s,
        prompt=lengths(prompt),
        output=lengths(output),
        prompt_per_output=float(prompt.sum() / output.sum()),
        prompt_tokens_per_s=float(prompt.sum() / span_s) if span_s else 0.0,
        output_tokens_per_s=float(output.sum() / span_s) if span_s else 0.0,
        token_hit=token_hit,
        block_hit=block_hit,
        unique_blocks=unique,
        notes=trace.notes,
    )


def cache_hits(trace: Trace, capacity_tokens: int | None) -> tuple[float, float, int]:
    """(token hit, block hit, blocks ever seen) of an LRU prefix cache; None is one that never evicts."""
    if trace.block_tokens is None:
        raise LocalError("the trace has no block ids, so no cache hit can be computed", field="workload.trace")
    size = trace.block_tokens
    capacity = None if capacity_tokens is None else capacity_tokens // size
    cache: OrderedDict[int, None] = OrderedDict()
    hit_tokens = hit_blocks = all_tokens = all_blocks = misses = 0
    for request in trace.requests:
        ids = request.block_ids
        matched = 0
        for block_id in ids:
            if block_id not in cache:
                break
            matched += 1
        all_tokens += request.prompt_tokens
        all_blocks += len(ids)
        hit_blocks += matched
        hit_tokens += min(matched * size, request.prompt_tokens)
        for block_id in ids:
            if block_id in cache:
                cache.move_to_end(block_id)
            else:
                cache[block_id] = None
                misses += 1
        if capacity is not None:
            while len(cache) > capacity:
                cache.popitem(last=False)
    return hit_tokens / all_tokens, hit_blocks / all_blocks, misses


def lru_curve(trace: Trace, capacities_tokens: tuple[int, ...]) -> dict[int, float]:
    """Token hit for each cache size."""
    return {capacity: cache_hits(trace, capacity)[0] for capacity in capacities_tokens}
