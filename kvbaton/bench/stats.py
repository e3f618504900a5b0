"""From samples to numbers: TTFT, TPOT, ITL, end-to-end, stalls, rates, attainment, each with its interval.

Definitions (docs/measure.md has them with a drawing):
* TTFT: due instant to the first visible chunk (answer, reasoning or tool call; never a role or an empty delta).
* TPOT of a request: (last visible chunk - first visible chunk) / (output tokens - 1); undefined for one token.
* ITL: every gap between visible chunks, divided by the tokens of the chunk that ends it, once per token. The gaps
  themselves are the inter-chunk latency (ICL), under that name.
* end-to-end: due instant to the last visible chunk, not to a usage chunk, [DONE] or the close of the stream.
Failed requests give no latency and no tokens; in attainment they are misses.

Knows nothing about sockets or files; chance is a seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.bench.samples import RequestSample
from kvbaton.bench.sse import ChunkKind

Floats = npt.NDArray[np.float64]
PERCENTILES = (50, 90, 95, 99)
# Enough for the second digit of an interval's ends; more only costs time.
NUM_RESAMPLES = 500


class Interval(msgspec.Struct, frozen=True):
    low: float
    high: float

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


class Summary(msgspec.Struct, frozen=True):
    """One metric over a run. Intervals are 95%, by resampling requests (gaps of one request belong together)."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    intervals: dict[str, Interval] = {}

    def value(self, name: str) -> float:
        return float(getattr(self, name))


class Gates(msgspec.Struct, frozen=True):
    """The service-level objective: both limits hold for a request, for the chosen fraction of requests."""

    ttft_s: float
    tpot_s: float
    attainment: float = 0.9

    def met_by(self, sample: RequestSample) -> bool:
        """One token has no TPOT and passes any TPOT gate; a failed request meets nothing."""
        if not sample.ok:
            return False
        ttft, tpot = ttft_s(sample), tpot_s(sample)
        if ttft is None and sample.closed_s is not None:
            ttft = sample.closed_s - sample.intended_s  # an empty answer is whole when its stream closes
        return ttft is not None and ttft <= self.ttft_s and (tpot is None or tpot <= self.tpot_s)


def ttft_s(sample: RequestSample) -> float | None:
    seen = sample.visible()
    return seen[0][0] - sample.intended_s if seen else None


def answer_ttft_s(sample: RequestSample) -> float | None:
    """To the first token of the answer itself, after any reasoning."""
    for time, kind, _ in sample.chunks:
        if kind == ChunkKind.CONTENT:
            return time - sample.intended_s
    return None


def e2e_s(sample: RequestSample) -> float | None:
    seen = sample.visible()
    return seen[-1][0] - sample.intended_s if seen else None


def service_s(sample: RequestSample) -> float | None:
    """From the actual write to the last visible chunk: what the server took, blind to waiting in the client."""
    seen = sample.visible()
    return seen[-1][0] - sample.sent_s if seen and sample.sent_s is not None else None


def tpot_s(sample: RequestSample) -> float | None:
    seen = sample.visible()
    if not seen or sample.output_tokens <= 1:
        return None
    return (seen[-1][0] - seen[0][0]) / (sample.output_tokens - 1)


def chunk_gaps_s(sample: RequestSample) -> list[float]:
    return [after[0] - before[0] for before, after in pairwise(sample.visible())]


def itl_s(sample: RequestSample) -> tuple[list[float], list[float]]:
    """(seconds per token, how many tokens) for each gap; a chunk without whole tokens still counts as a gap of one."""
    values, weights = [], []
    for (before, _), (after, tokens) in pairwise(sample.visible()):
        weight = tokens if tokens > 0 else 1.0
        values.append((after - before) / weight)
        weights.append(weight)
    return values, weights


def quantile(sorted_values: Floats, cumulated: Floats, fraction: float) -> float:
    """Weighted quantile; with unit weights it is numpy's linear interpolation."""
    if len(sorted_values) == 1:
        return float(sorted_values[0])
    position = fraction * (cumulated[-1] - 1.0)
    if position <= 0:
        return float(sorted_values[0])
    # Sample i covers positions [cumulated[i-1], cumulated[i] - 1]; between samples the value goes linearly.
    starts = np.empty_like(cumulated)
    starts[0] = 0.0
    starts[1:] = cumulated[:-1]
    index = int(np.searchsorted(starts, position, side="right")) - 1
    past = position - (cumulated[index] - 1.0)
    if past <= 0 or index + 1 == len(sorted_values):
        return float(sorted_values[index])
    share = min(1.0, past / max(1e-12, starts[index + 1] - (cumulated[index] - 1.0)))
    return float(sorted_values[index] + share * (sorted_values[index + 1] - sorted_values[index]))


def summarize(
    groups: Sequence[Sequence[float]], weights: Sequence[Sequence[float]] | None = None, seed: int = 0
) -> Summary | None:
    """Summary of the values of all groups. A group is one request: resampling keeps its values together."""
    sizes = [len(group) for group in groups]
    if sum(sizes) == 0:
        return None
    values = np.concatenate([np.asarray(group, dtype=np.float64) for group in groups if len(group)])
    weight = np.ones_like(values)
    if weights is not None:
        weight = np.concatenate([np.asarray(group, dtype=np.float64) for group in weights if len(group)])
    owner = np.repeat(np.arange(len(groups)), sizes)
    order = np.argsort(values, kind="stable")
    values, weight, owner = values[order], weight[order], owner[order]
    point = _points(values, weight)
    intervals = _bootstrap(values, weight, owner, len(groups), seed) if sum(size > 0 for size in sizes) > 1 else {}
    return Summary(count=round(float(weight.sum())), max=float(values[-1]), intervals=intervals, **point)


def _points(values: Floats, weight: Floats) -> dict[str, float]:
    cumulated = np.cumsum(weight)
    point = {f"p{percent}": quantile(values, cumulated, percent / 100) for percent in PERCENTILES}
    point["mean"] = float((values * weight).sum() / cumulated[-1])
    return point


def _bootstrap(
    values: Floats, weight: Floats, owner: npt.NDArray[np.int64], num_groups: int, seed: int
) -> dict[str, Interval]:
    chance = np.random.default_rng(seed)
    # A million weighted values a resample is a second; long runs need fewer resamples for the same steadiness.
    num = max(100, min(NUM_RESAMPLES, 40_000_000 // max(1, len(values))))
    drawn: dict[str, list[float]] = {}
    for _ in range(num):
        times = chance.multinomial(num_groups, np.full(num_groups, 1.0 / num_groups))
        resampled = weight * times[owner]
        kept = resampled > 0
        if not kept.any():
            continue
        for name, value in _points(values[kept], resampled[kept]).items():
            drawn.setdefault(name, []).append(value)
    return {name: Interval(*(float(x) for x in np.percentile(found, [2.5, 97.5]))) for name, found in drawn.items()}


def wilson(successes: int, total: float, z: float = 1.96) -> Interval:
    """95% interval of a proportion; honest at 0 and 1 and for small counts."""
    if total <= 0:
        return Interval(0.0, 1.0)
    share = successes / total if total else 0.0
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return Interval(max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale))


def effective_count(passed: Sequence[bool]) -> float:
    """How many independent requests these are worth: neighbours share a queue, so they pass or fail together."""
    num = len(passed)
    values = np.asarray(passed, dtype=np.float64)
    if num < 8 or values.std() == 0:
        return float(num)
    centred = values - values.mean()
    correlation = float((centred[1:] * centred[:-1]).sum() / (centred * centred).sum())
    correlation = min(0.95, max(0.0, correlation))
    return max(1.0, num * (1 - correlation) / (1 + correlation))


class Attainment(msgspec.Struct, frozen=True):
    share: float
    interval: Interval
    num_met: int
    num_total: int
    ttft_share: float
    tpot_share: float


def attainment(samples: Sequence[RequestSample], gates: Gates) -> Attainment:
    """Share of all requests, failed ones included, that met both gates; and each gate alone."""
    ordered = sorted(samples, key=lambda sample: sample.intended_s)
    met = [gates.met_by(sample) for sample in ordered]
    total = len(met)
    one = Gates(gates.ttft_s, math.inf), Gates(math.inf, gates.tpot_s)
    alone = [sum(gate.met_by(sample) for sample in ordered) / total if total else 0.0 for gate in one]
    share = sum(met) / total if total else 0.0
    worth = effective_count(met)
    return Attainment(share, wilson(round(share * worth), worth), sum(met), total, alone[0], alone[1])


class Stall(msgspec.Struct, frozen=True):
    """A gap over the bound: the user watched the text stand still."""

    index: int
    start_s: float
    gap_s: float


def stalls(samples: Sequence[RequestSample], bound_s: float) -> list[Stall]:
    found = []
    for sample in samples:
        for (before, _), (after, _) in pairwise(sample.visible()):
            if sample.ok and after - before > bound_s:
                found.append(Stall(sample.index, before, after - before))
    return sorted(found, key=lambda stall: stall.start_s)


class Rates(msgspec.Struct, frozen=True):
    """Throughput of successes. ``wall_s`` runs from the first due instant to the last visible chunk of the cohort."""

    wall_s: float
    offered_per_s: float
    achieved_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    peak_output_tokens_per_s: float
    output_tokens: int
    input_tokens: int


def rates(samples: Sequence[RequestSample]) -> Rates:
    good = [sample for sample in samples if sample.ok and sample.visible()]
    if not good:
        return Rates(0, 0, 0, 0, 0, 0, 0, 0)
    due = sorted(sample.intended_s for sample in samples)
    start = due[0]
    wall = max(max(sample.visible()[-1][0] for sample in good) - start, 1e-9)
    span = due[-1] - due[0]
    outputs = sum(sample.output_tokens for sample in good)
    inputs = sum(
        sample.usage_prompt_tokens if sample.usage_prompt_tokens is not None else sample.prompt_tokens
        for sample in good
    )
    return Rates(
        wall_s=wall,
        offered_per_s=(len(due) - 1) / span if span > 0 else 0.0,
        achieved_per_s=len(good) / wall,
        output_tokens_per_s=outputs / wall,
        input_tokens_per_s=inputs / wall,
        peak_output_tokens_per_s=_peak(good, start, wall),
        output_tokens=outputs,
        input_tokens=inputs,
    )


def _peak(samples: Sequence[RequestSample], start_s: float, wall_s: float) -> float:
    """Busiest second. The wall is cut in equal bins of about one second, so the peak is never under the mean."""
    num_bins = max(1, math.ceil(wall_s))
    width = wall_s / num_bins
    bins = np.zeros(num_bins)
    for sample in samples:
        seen = sample.visible()
        stated = sum(tokens for _, tokens in seen)
        # A stop token is in the count and in no chunk: scaling keeps the sum of the bins equal to the total.
        scale = sample.output_tokens / stated if stated else 0.0
        for time, tokens in seen:
            bins[min(num_bins - 1, max(0, int((time - start_s) / width)))] += tokens * scale
    return float(bins.max() / width)


def failures(samples: Sequence[RequestSample]) -> dict[str, int]:
    """Failed requests by reason, most frequent first."""
    reasons = Counter(
        f"HTTP {sample.status}" if sample.status and not 200 <= sample.status < 300 else str(sample.error)
        for sample in samples
        if not sample.ok
    )
    return dict(reasons.most_common())
