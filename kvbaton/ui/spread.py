"""Percentiles of what a histogram counted between two looks at it, and the share below a gate.

Within a bucket the observations are taken to lie evenly, as Prometheus does, so a percentile is as fine as the buckets
are. Pure; knows nothing about where counts come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True):
    p50_s: float
    p90_s: float
    p99_s: float
    num: int  # observations
    met: float | None = None  # share at or below the gate, where there is one


def since(now: Sequence[int], before: Sequence[int]) -> list[int]:
    """What was counted in between. Counts only grow within one life of a process."""
    return [new - old for new, old in zip(now, before, strict=True)]


def spread(bounds: Sequence[float], counts: Sequence[int], gate_s: float | None = None) -> Spread | None:
    """``counts`` has one more entry than ``bounds``: those above the last. None when nothing was counted."""
    num = sum(counts)
    if num == 0:
        return None
    p50_s, p90_s, p99_s = (quantile(bounds, counts, fraction) for fraction in (0.5, 0.9, 0.99))
    return Spread(p50_s, p90_s, p99_s, num, None if gate_s is None else share_below(bounds, counts, gate_s))


def quantile(bounds: Sequence[float], counts: Sequence[int], fraction: float) -> float:
    """Above the last bound nothing is known but that: the last bound is the answer."""
    rank, below, low = fraction * sum(counts), 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return low + (bound - low) * (rank - below) / count
        below += count
        low = bound
    return bounds[-1]


def share_below(bounds: Sequence[float], counts: Sequence[int], gate_s: float) -> float:
    below, low = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if gate_s < bound:
            return (below + count * (gate_s - low) / (bound - low)) / sum(counts)
        below += count
        low = bound
    return below / sum(counts)
