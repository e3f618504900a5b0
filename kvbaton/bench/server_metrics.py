"""What the endpoint's own metrics say of a run: KV transfer times and bytes, as the difference of two scrapes.

Knows which metric names of ours and of other engines mean the same; knows nothing about the requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families

# Histograms of seconds from the first to the last byte of one request's KV, ours first.
TRANSFER_SECONDS = ("kvbaton_worker_transfer_seconds", "vllm:nixl_xfer_time_seconds")
TRANSFER_BYTES = (
    "kvbaton_worker_transfer_received_bytes_total",
    "kvbaton_router_transfer_bytes_total",
    "vllm:nixl_bytes_transferred_sum",
)


class Scrape(msgspec.Struct):
    """Cumulative values summed over all labels but the bucket's edge."""

    buckets: dict[str, dict[float, float]]
    values: dict[str, float]


class TransferMetrics(msgspec.Struct, frozen=True):
    """p50 and p99 are read off buckets, so they are as coarse as those; ``source`` names the metric."""

    count: int
    p50_ms: float
    p99_ms: float
    p99_upper_ms: float  # upper edge of the bucket that holds p99
    bytes: float | None
    source: str


def parse(text: str) -> Scrape:
    scrape = Scrape({}, {})
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                name = sample.name.removesuffix("_bucket")
                edge = float(sample.labels.get("le", "inf"))
                buckets = scrape.buckets.setdefault(name, {})
                buckets[edge] = buckets.get(edge, 0.0) + sample.value
            else:
                scrape.values[sample.name] = scrape.values.get(sample.name, 0.0) + sample.value
    return scrape


def transfer_between(before: Scrape, after: Scrape) -> TransferMetrics | None:
    """KV transfers that ended between the two scrapes; None when the endpoint exports none or none happened."""
    for name in TRANSFER_SECONDS:
        if name not in after.buckets:
            continue
        earlier = before.buckets.get(name, {})
        counts = {edge: value - earlier.get(edge, 0.0) for edge, value in sorted(after.buckets[name].items())}
        total = counts.get(math.inf, 0.0)
        if total <= 0:
            continue
        p99, upper = _quantile(counts, 0.99)
        return TransferMetrics(
            count=round(total),
            p50_ms=_quantile(counts, 0.5)[0] * 1e3,
            p99_ms=p99 * 1e3,
            p99_upper_ms=upper * 1e3,
            bytes=_bytes(before, after),
            source=name,
        )
    return None


def _bytes(before: Scrape, after: Scrape) -> float | None:
    for name in TRANSFER_BYTES:
        if name in after.values:
            return after.values[name] - before.values.get(name, 0.0)
    return None


def _quantile(counts: Mapping[float, float], fraction: float) -> tuple[float, float]:
    """(estimate, upper edge), linear inside a bucket. In the last, open bucket its lower edge is all one knows."""
    wanted = fraction * counts[math.inf]
    lower, below = 0.0, 0.0
    for edge, cumulated in counts.items():
        if cumulated >= wanted:
            if math.isinf(edge):
                return lower, edge
            inside = cumulated - below
            return lower + (edge - lower) * ((wanted - below) / inside if inside else 1.0), edge
        lower, below = edge, cumulated
    return lower, math.inf
