"""What the endpoint's own metrics say of a run: KV transfer times and bytes, as the difference of two scrapes.

Knows which metric names of ours and of other engines mean the same; knows nothing about the requests. Invariant: what
nobody exports is left out, and is not a zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

# Histograms of seconds from the first to the last byte of one request's KV, ours first.
TRANSFER_SECONDS = ("kvbaton_worker_transfer_seconds", "vllm:nixl_xfer_time_seconds")
# The engine's own word first: ours repeats it, or derives it.
TRANSFER_BYTES = (
    "vllm:nixl_bytes_transferred_sum",
    "kvbaton_worker_transfer_received_bytes_total",
    "kvbaton_router_transfer_bytes_total",
)
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
# Where prompt tokens came from -> who counts them, the engine's own word first.
PROMPT_TOKENS = {
    "computed": (f"{_BY_SOURCE}/local_compute", "kvbaton_worker_prompt_tokens_total"),
    "cached": (f"{_BY_SOURCE}/local_cache_hit", "kvbaton_worker_cached_prompt_tokens_total"),
    "moved": (f"{_BY_SOURCE}/external_kv_transfer",),
}


class Scrape(msgspec.Struct):
    """Cumulative values summed over all labels but the bucket's edge; those with a source are kept by it as well."""

    buckets: dict[str, dict[float, float]]
    values: dict[str, float]


class TransferMetrics(msgspec.Struct, frozen=True):
    """p50 and p99 are read off buckets, so they are as coarse as those; ``source`` names the metric."""

    count: int
    p50_ms: float
    p99_ms: float
    p99_upper_ms: float | None  # upper edge of the bucket that holds p99; None, from a file: it has none
    bytes: float | None
    source: str
    buckets: tuple[tuple[float, float], ...] = ()  # edge and cumulated count, without the open one


class Moved(msgspec.Struct, frozen=True):
    """KV that came from other workers, and where prompt tokens came from, as the endpoint's processes count it."""

    bytes: float
    source: str
    prompt_tokens: dict[str, float] = {}  # computed, cached, moved: those that are counted


def parse(text: str) -> Scrape:
    """ValueError: it is no exposition."""
    scrape = Scrape({}, {})
    try:
        families = list(text_string_to_metric_families(text))
    except Exception as error:  # the parser raises what it happens to meet
        raise ValueError(f"no text of Prometheus: {error!r}") from error
    for family in families:
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                name = sample.name.removesuffix("_bucket")
                edge = float(sample.labels.get("le", "inf"))
                buckets = scrape.buckets.setdefault(name, {})
                buckets[edge] = buckets.get(edge, 0.0) + sample.value
            else:
                names = [sample.name]
                if "source" in sample.labels:
                    names.append(f"{sample.name}/{sample.labels['source']}")
                for name in names:
                    scrape.values[name] = scrape.values.get(name, 0.0) + sample.value
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
            bytes=_first(before, after, TRANSFER_BYTES)[0],
            source=name,
            buckets=tuple((edge, count) for edge, count in counts.items() if not math.isinf(edge)),
        )
    return None


def moved_between(before: Scrape, after: Scrape) -> Moved | None:
    """None when nobody there counts KV bytes; zero bytes are an answer."""
    num_bytes, source = _first(before, after, TRANSFER_BYTES)
    if num_bytes is None:
        return None
    tokens = {what: _first(before, after, names)[0] for what, names in PROMPT_TOKENS.items()}
    return Moved(num_bytes, source, {what: count for what, count in tokens.items() if count is not None})


def pooled(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several runs of the same thing said, as of one."""
    found: dict[str, Any] = {}
    transfers = [msgspec.convert(one["transfer"], TransferMetrics) for one in several if one.get("transfer")]
    if transfers:
        found["transfer"] = msgspec.to_builtins(_pool(transfers))
    moved = [msgspec.convert(one["moved"], Moved) for one in several if one.get("moved")]
    if moved:
        tokens = {what: sum(one.prompt_tokens.get(what, 0.0) for one in moved) for what in moved[0].prompt_tokens}
        found["moved"] = msgspec.to_builtins(Moved(sum(one.bytes for one in moved), moved[0].source, tokens))
    return found


def _pool(transfers: Sequence[TransferMetrics]) -> TransferMetrics:
    last = transfers[-1]
    if len(transfers) == 1 or len({tuple(edge for edge, _ in one.buckets) for one in transfers}) > 1:
        return last  # written before buckets were kept, or by another engine
    counts = {edge: sum(dict(one.buckets)[edge] for one in transfers) for edge, _ in last.buckets}
    counts[math.inf] = sum(one.count for one in transfers)
    known = [one.bytes for one in transfers if one.bytes is not None]
    p99, upper = _quantile(counts, 0.99)
    return TransferMetrics(
        count=round(counts[math.inf]),
        p50_ms=_quantile(counts, 0.5)[0] * 1e3,
        p99_ms=p99 * 1e3,
        p99_upper_ms=upper * 1e3,
        bytes=sum(known) if known else None,
        source=last.source,
        buckets=tuple((edge, count) for edge, count in counts.items() if not math.isinf(edge)),
    )


def _first(before: Scrape, after: Scrape, names: Sequence[str]) -> tuple[float | None, str]:
    for name in names:
        if name in after.values:
            return after.values[name] - before.values.get(name, 0.0), name
    return None, ""


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
